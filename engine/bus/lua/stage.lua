-- stage: a slice of a long list of requests gets its records and entries, which nobody sees before lua/commit.lua.
--
-- KEYS ledger, then staged
-- ARGV share of maxmemory, time in ms that a staged record is kept, number of requests; of each: id, payload, number of field names and
--      values, these
-- Answer: ok; or refused, as `enqueue`.
--
-- A record in state `staged` expires, and its entry goes with it at a later call, where no commit follows.
-- Sent twice, or for a list that was committed: the requests that stand there with the same first API server and handle are left alone.

local STAGED = KEYS[OWN_KEYS + 1]
local memory_share, ttl = ARGV[1], ARGV[2]
local SWEPT = 64 -- entries of lists that were not committed, at one call

local function sweep()
  local before = tonumber(NOW) - tonumber(ttl) / 1000
  local entries = redis.call('ZRANGEBYSCORE', STAGED, '-inf', before, 'LIMIT', 0, SWEPT)
  if #entries == 0 then return end
  redis.call('XDEL', REQUESTS, unpack(entries))
  redis.call('ZREM', STAGED, unpack(entries))
end

local function stage(request)
  local record = redis.call('HMGET', RECORD .. request.id, 'client', 'handle', 'attachments')
  if first_attachment(record[1], record[2], record[3]) == request.client .. ':' .. request.handle then return nil end
  if record[1] then return refused('duplicate', 0, 0, request.id) end
  local entry = write_entry(request.id, request.payload, request.fields)
  redis.call('HSET', RECORD .. request.id, 'state', 'staged')
  redis.call('PEXPIRE', RECORD .. request.id, ttl)
  redis.call('ZADD', STAGED, NOW, entry)
  return nil
end

sweep()
local answer = check_memory(memory_share)
if answer then return answer end
for _, request in ipairs(parse_requests(3)) do
  answer = stage(request)
  if answer then return answer end
end
return {'ok'}
