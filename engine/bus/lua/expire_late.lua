-- expire_late: requests that wait and are past their deadline end with an error.
--
-- KEYS ledger
-- ARGV most requests, error's number among the reasons, prefix of client channels, error, seconds until one that runs is named again
-- Answer: how many ended, and the ids of those that run and are late: their engines are to end them.

local most, reason, client_channel, error, pause = unpack(ARGV)

local ended, running = 0, {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', DEADLINES, '-inf', NOW, 'LIMIT', 0, most)) do
  local state = redis.call('HGET', RECORD .. id, 'state')
  if state == 'queued' and end_in_error(id, client_channel, reason, error) then
    ended = ended + 1
  elseif state == 'running' then
    running[#running + 1] = id
    redis.call('ZADD', DEADLINES, tonumber(NOW) + tonumber(pause), id)
  else
    redis.call('ZREM', DEADLINES, id)
  end
end
return {ended, running}
