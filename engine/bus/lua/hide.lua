-- hide: the answer of a request is shown to no client any more.
--
-- KEYS ledger
-- ARGV id
-- Answer: its state, or unknown. Of an ended one, output and outline go. Sent twice: nothing changes again.

local id = ARGV[1]
local key = RECORD .. id

local function drop_result()
  local size = redis.call('HSTRLEN', key, 'output') + redis.call('HSTRLEN', key, 'outline')
  if redis.call('LREM', KEPT, -1, string.format('%d', size) .. ' ' .. id) > 0 then add_sum('kept', -size) end
  if redis.call('HDEL', key, 'output', 'outline') > 0 then redis.call('HSET', key, 'output_dropped', '1') end
end

local state = redis.call('HGET', key, 'state')
if not state or state == 'staged' then return 'unknown' end
redis.call('HSET', key, 'hidden', '1')
if state == 'ended' then drop_result() end
return state
