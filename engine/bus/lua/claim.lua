-- claim: the wanted slot or the lowest free one, under a new incarnation.
--
-- KEYS slots, last incarnation, prefix of owners, prefix of slots, prefix of claims, prefix of the slots' progress, journals
-- ARGV nonce, time to live in ms, wanted slot
-- Answer: slot, incarnation.
--
-- A slot is free when it has no owner, or when a takeover left it vacant. Silence alone frees none: its engine may come back.
-- An incarnation is Redis' clock in microseconds, and higher than all before it even where that clock was set back.
-- Sent twice: the slot whose claim bears the same nonce is answered again.

local SLOTS, LAST, OWNER, SLOT, CLAIM, PROGRESS, JOURNALS = unpack(KEYS)
local nonce, ttl, wanted = unpack(ARGV)
local CLAIM_TTL = 600000 -- ms

local function is_vacant(owner) return string.find(owner, 'vacant', 1, true) ~= nil end

for _, number in ipairs(redis.call('SMEMBERS', SLOTS)) do
  local owner = redis.call('GET', OWNER .. number)
  if owner and not is_vacant(owner) and redis.call('GET', CLAIM .. number) == nonce then return {number, owner} end
end

local function is_held(number)
  local owner = redis.call('GET', OWNER .. number)
  return owner and not is_vacant(owner)
end

local number = tonumber(wanted)
if is_held(number) then
  number = 0
  while is_held(number) do number = number + 1 end
end
local incarnation = new_incarnation(LAST)
redis.call('SET', OWNER .. number, incarnation)
redis.call('SET', SLOT .. number, incarnation, 'PX', ttl)
redis.call('SET', CLAIM .. number, nonce, 'PX', CLAIM_TTL)
redis.call('DEL', PROGRESS .. number)
redis.call('SADD', SLOTS, number)
redis.call('SADD', JOURNALS, number .. ':' .. incarnation)
return {tostring(number), incarnation}
