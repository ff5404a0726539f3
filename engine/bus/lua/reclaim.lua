-- reclaim: an engine owns its slot again after a wipe, under the incarnation that it had.
--
-- KEYS owner, slot, slots, last incarnation, journals
-- ARGV incarnation, slot's number, time to live in ms
-- Answer: 1, or the error FENCED where another incarnation owns the slot by now.

local OWNER, SLOT, SLOTS, LAST, JOURNALS = unpack(KEYS)
local incarnation, number, ttl = unpack(ARGV)

if not redis.call('SET', OWNER, incarnation, 'NX') and redis.call('GET', OWNER) ~= incarnation then
  return redis.error_reply('FENCED the slot is owned by another incarnation')
end
redis.call('SET', SLOT, incarnation, 'PX', ttl)
redis.call('SADD', SLOTS, number)
redis.call('SADD', JOURNALS, number .. ':' .. incarnation)
if tonumber(redis.call('GET', LAST) or 0) < tonumber(incarnation) then redis.call('SET', LAST, incarnation) end
return 1
