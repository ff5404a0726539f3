-- claim: the wanted slot or the lowest free one, under a new incarnation.
--
-- KEYS slots, last incarnation, prefix of slots, prefix of claims
-- ARGV nonce, time to live in ms, wanted slot
-- Answer: slot, incarnation.
--
-- An incarnation is Redis' clock in microseconds, and higher than all before it even where that clock was set back.
-- Sent twice: the slot whose claim bears the same nonce is answered again.

local SLOTS, LAST, SLOT, CLAIM = unpack(KEYS)
local nonce, ttl, wanted = unpack(ARGV)
local CLAIM_TTL = 600000 -- ms

local function new_incarnation()
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
  local last = tonumber(redis.call('GET', LAST) or 0)
  local text = string.format('%.0f', math.max(now, last + 1))
  redis.call('SET', LAST, text)
  return text
end

for _, number in ipairs(redis.call('SMEMBERS', SLOTS)) do
  local holder = redis.call('GET', SLOT .. number)
  if holder and redis.call('GET', CLAIM .. number) == nonce then return {number, holder} end
end

local function is_held(number) return redis.call('EXISTS', SLOT .. number) == 1 end

local number = tonumber(wanted)
if is_held(number) then
  number = 0
  while is_held(number) do number = number + 1 end
end
local incarnation = new_incarnation()
redis.call('SET', SLOT .. number, incarnation, 'PX', ttl)
redis.call('SET', CLAIM .. number, nonce, 'PX', CLAIM_TTL)
redis.call('SADD', SLOTS, number)
return {tostring(number), incarnation}
