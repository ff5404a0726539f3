-- hide: the answer of a request is shown to no client any more.
--
-- KEYS ledger
-- ARGV id
-- Answer: its state, or unknown. Of an ended one, output and outline go. Sent twice: nothing changes again.

local key = RECORD .. ARGV[1]
local state = redis.call('HGET', key, 'state')
if not state or state == 'staged' then return 'unknown' end
redis.call('HSET', key, 'hidden', '1')
if state == 'ended' and redis.call('HDEL', key, 'output', 'outline') > 0 then redis.call('HSET', key, 'output_dropped', '1') end
return state
