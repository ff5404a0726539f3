-- beat: the heartbeat of a slot's owner, with what the engine says of itself.
--
-- KEYS owner, slot, its info, served, served by this fingerprint, info of the last engine, slots, journals
-- ARGV incarnation, time to live in ms, info, failover time in ms, slot's number
-- Answer: Redis' clock, by which the engine sets its own, as TIME gives it; or the error FENCED or UNOWNED. A slot whose time to live
-- ran out is revived: it told only that nothing was heard of its engine, which is the owner until another incarnation is.
-- The lists of slots and journals come again with each beat: whoever loses one of them finds no engine.

local OWNER, SLOT, INFO, SERVED, SERVED_BY, LAST_INFO, SLOTS, JOURNALS = unpack(KEYS)
local incarnation, ttl, info, failover, number = unpack(ARGV)

local owner = redis.call('GET', OWNER)
if not owner then return redis.error_reply('UNOWNED the slot has no owner') end
if owner ~= incarnation then return redis.error_reply('FENCED the slot is owned by another incarnation') end
redis.call('SET', SLOT, incarnation, 'PX', ttl)
redis.call('SET', INFO, info, 'PX', ttl)
redis.call('SET', LAST_INFO, info, 'PX', failover)
redis.call('SET', SERVED, '', 'PX', failover)
redis.call('SET', SERVED_BY, '', 'PX', failover)
redis.call('SADD', SLOTS, number)
redis.call('SADD', JOURNALS, number .. ':' .. incarnation)
return redis.call('TIME')
