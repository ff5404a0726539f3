-- roll_usage: lines of the usage stream become sums of their days, and are gone, at once. Each line counts exactly once, even if a
-- process is killed or several run it.
--
-- KEYS usage stream, days, prefix of the days' hashes
-- ARGV lines at most, time in ms that a day's sums are kept
-- Answer: the number of lines.

local USAGE, DAYS, DAY = unpack(KEYS)
local lines = redis.call('XRANGE', USAGE, '-', '+', 'COUNT', ARGV[1])
local ids, touched = {}, {}

for i, line in ipairs(lines) do
  local fields = {}
  for j = 1, #line[2], 2 do fields[line[2][j]] = line[2][j + 1] end
  local key = DAY .. fields.day
  redis.call('HINCRBY', key, 'requests:' .. fields.tenant, 1)
  redis.call('HINCRBY', key, fields.reason .. ':' .. fields.tenant, 1)
  for _, column in ipairs({'prompt_tokens', 'cached_tokens', 'output_tokens'}) do
    redis.call('HINCRBY', key, column .. ':' .. fields.tenant, fields[column])
  end
  touched[fields.day] = key
  ids[i] = line[1]
end
for day, key in pairs(touched) do
  redis.call('SADD', DAYS, day)
  redis.call('PEXPIRE', key, ARGV[2])
end
if #ids > 0 then redis.call('XDEL', USAGE, unpack(ids)) end
return #ids
