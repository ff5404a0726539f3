-- prioritize: a request that waits, an orphan too, gets another place in the order.
--
-- KEYS ledger
-- ARGV id, priority
-- Answer: its state, or unknown. Only one that is queued has changed. Its virtual start remains. Sent twice: nothing changes again.

local id, priority = unpack(ARGV)
local record = redis.call('HMGET', RECORD .. id, 'state', 'entry', 'start', 'fingerprint', 'journals', 'tier')
if record[1] ~= 'queued' then return record[1] or 'unknown' end
redis.call('HSET', RECORD .. id, 'priority', priority)
local queue = record[5] and RESUME .. record[4] or ORDER
redis.call('ZADD', queue, 'XX', score_of(record[6], priority, record[3]), order_member(record[2]))
return 'queued'
