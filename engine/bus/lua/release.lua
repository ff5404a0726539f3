-- release: the slot is given back by its holder.
--
-- KEYS slot, its info
-- ARGV incarnation
-- Answer: 1, or 0 where another incarnation or none held it.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1], KEYS[2])
return 1
