-- absent: has a heartbeat key been missing at two looks, far enough apart?
--
-- KEYS the heartbeat's key, marker
-- ARGV least time between the looks in ms, most time in ms
-- Answer: 1 where it has.
--
-- The looks may be different processes', so the marker of the first one is kept here. It bears the server's run id: a heartbeat that
-- ran out while Redis itself was down proves nothing. It expires where no process takes a second look.

local least, most = tonumber(ARGV[1]), ARGV[2]

if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('DEL', KEYS[2])
  return 0
end
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local marker = redis.call('GET', KEYS[2])
local marked_run, since = string.match(marker or '', '^(%x+) (%d+)$')
if marked_run ~= run then
  redis.call('SET', KEYS[2], run .. ' ' .. string.format('%d', now), 'PX', most)
  return 0
end
if now - tonumber(since) < least then return 0 end
return 1
