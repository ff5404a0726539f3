-- expire_orphans: requests that no engine came to go on with end with an error.
--
-- KEYS ledger, then prefix of what fingerprints were served lately
-- ARGV failover time in ms, most requests, error's number among the reasons, prefix of client channels
-- Answer: how many ended. An engine of the fingerprint that lived within the failover time may still come back or be busy.

local SERVED_BY = KEYS[OWN_KEYS + 1]
local failover, most, reason, client_channel = unpack(ARGV)
local ERROR = 'The engine that ran this request died, and no engine came to continue it.'

local ended = 0
local before = string.format('%.6f', tonumber(NOW) - tonumber(failover) / 1000)
for _, id in ipairs(redis.call('ZRANGEBYSCORE', ORPHANS, '-inf', before)) do
  if ended >= tonumber(most) then break end
  local fingerprint = redis.call('HGET', RECORD .. id, 'fingerprint')
  if not fingerprint then
    redis.call('ZREM', ORPHANS, id)
  elseif redis.call('EXISTS', SERVED_BY .. fingerprint) == 0 and end_in_error(id, client_channel, reason, ERROR) then
    ended = ended + 1
  end
end
return ended
