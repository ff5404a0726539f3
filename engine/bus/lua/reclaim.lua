-- reclaim: an engine owns its slot again after a wipe, under the incarnation that it had.
--
-- KEYS owner, slot, slots, last incarnation, journals
-- ARGV incarnation, slot's number, time to live in ms
-- Answer: 1, or the error FENCED where a higher incarnation owns the slot by now. A lower one is an engine that this one had followed,
-- and that was not dead but slow: it came first after the wipe.

local OWNER, SLOT, SLOTS, LAST, JOURNALS = unpack(KEYS)
local incarnation, number, ttl = unpack(ARGV)

local owner = redis.call('GET', OWNER)
if owner and tonumber(string.match(owner, '^%d+')) > tonumber(incarnation) then
  return redis.error_reply('FENCED the slot is owned by another incarnation')
end
redis.call('SET', OWNER, incarnation)
redis.call('SET', SLOT, incarnation, 'PX', ttl)
redis.call('SADD', SLOTS, number)
redis.call('SADD', JOURNALS, number .. ':' .. incarnation)
if tonumber(redis.call('GET', LAST) or 0) < tonumber(incarnation) then redis.call('SET', LAST, incarnation) end
return 1
