-- release: the slot is given back by its owner, who has nothing in flight any more.
--
-- KEYS owner, slot, its info
-- ARGV incarnation
-- Answer: 1, or 0 where another incarnation or none owned it.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
return 1
