-- claim: the lowest free slot, under a new incarnation.
--
-- KEYS slots, last incarnation, prefix of slots, prefix of claims
-- ARGV nonce, time to live in ms
-- Answer: slot, incarnation.
--
-- An incarnation is Redis' clock in microseconds, and higher than all before it even where that clock was set back.
-- Sent twice: the slot whose claim bears the same nonce is answered again.

local SLOTS, LAST, SLOT, CLAIM = unpack(KEYS)
local nonce, ttl = unpack(ARGV)
local CLAIM_TTL = 600000 -- ms

local function new_incarnation()
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
  local last = tonumber(redis.call('GET', LAST) or 0)
  local text = string.format('%.0f', math.max(now, last + 1))
  redis.call('SET', LAST, text)
  return text
end

local number = 0
while true do
  local holder = redis.call('GET', SLOT .. number)
  if not holder then break end
  if redis.call('GET', CLAIM .. number) == nonce then return {tostring(number), holder} end
  number = number + 1
end
local incarnation = new_incarnation()
redis.call('SET', SLOT .. number, incarnation, 'PX', ttl)
redis.call('SET', CLAIM .. number, nonce, 'PX', CLAIM_TTL)
redis.call('SADD', SLOTS, number)
return {tostring(number), incarnation}
