-- What the scripts that move requests share. It stands before each of them in the text that Redis gets (engine/bus/call.py).
--
-- KEYS 1-18 are the same in all. RECORD, EXTERNAL, TOMBSTONE, RESUME and OUTPUT are prefixes: which record an entry belongs to is
-- known only once the entry was read. They carry the model's hash tag, so that what is built from them lies in the slot that KEYS named.
--
-- The ledger: a request is queued (in ORDER, or as an orphan in a RESUME set), running (in the pending list of a consumer) or ended
-- (neither). LIVE, LOAD and the record's state change in the same script as that does.

local REQUESTS, ORDER, LIVE, ENDED, LOAD, USAGE, RECORD, EXTERNAL, TOMBSTONE, RESUME, ORPHANS, OUTPUT, KEPT,
  EXTERNALS, FAIR, HEIGHTS, DEADLINES, TAKERS = unpack(KEYS, 1, 18)
local OWN_KEYS = 18 -- a script's own keys begin behind these
local GROUP, CONSUMER = 'engines', 'engine-' -- the group, and the prefix of its consumers, one a slot (engine/bus/keys.py)

-- Epoch seconds with microseconds by Redis' clock, which is everybody's: those of the machines around it may differ by hours.
local TIME = redis.call('TIME')
local NOW = string.format('%d.%06d', TIME[1], TIME[2])
local CLOCK = tonumber(TIME[1]) * 1000 + math.floor(tonumber(TIME[2]) / 1000) -- the same in milliseconds
local EXTERNAL_KEPT = 128 -- requests found under one client-given id, besides live ones
local OLD_RETENTION = 3600000 -- ms, of a record whose `enqueue` was an older version's and wrote none

-- A member of ORDER is the entry's id with its sequence number padded: equal scores are then in order of arrival.
local function order_member(entry)
  local milliseconds, sequence = string.match(entry, '^(%d+)-(%d+)$')
  return milliseconds .. '-' .. string.format('%06d', tonumber(sequence))
end

local function entry_of(member)
  local milliseconds, sequence = string.match(member, '^(%d+)-(%d+)$')
  return milliseconds .. '-' .. string.format('%d', tonumber(sequence))
end

-- Add to a sum of LOAD. What comes to nothing goes.
local function add_sum(field, amount)
  if redis.call('HINCRBY', LOAD, field, amount) <= 0 then redis.call('HDEL', LOAD, field) end
end

-- What waits here. `sign`: 1 for a request that comes to wait, -1 for one that waits no more.
local function add_waiting(tenant, n, tokens, sign)
  add_sum('waiting', sign * n)
  add_sum('waiting:' .. tenant, sign * n)
  add_sum('tokens', sign * tokens)
  add_sum('tokens:' .. tenant, sign * tokens)
end

-- `sign`: 1 for a request that comes, -1 for one that ended.
local function add_request(tenant, client, n, sign)
  add_sum('requests', sign * n)
  add_sum('requests:' .. tenant, sign * n)
  add_sum('client:' .. client, sign)
end

-- Choices that a slot's engine has in flight: HEIGHTS, by slot; and in TAKERS, where it may take more.
local function add_height(slot, n)
  redis.call('ZADD', TAKERS, 'XX', 'INCR', n, slot)
  if tonumber(redis.call('ZINCRBY', HEIGHTS, n, slot)) <= 0 then redis.call('ZREM', HEIGHTS, slot) end
end

-- Until when a request may go on, in epoch seconds; nil: for ever.
local function note_deadline(id, deadline)
  if deadline then redis.call('ZADD', DEADLINES, deadline, id) else redis.call('ZREM', DEADLINES, id) end
end

-- Start-time fair queueing (Goyal, Vin, Cheng 1996). A tenant's requests follow each other in virtual time, each as long as the
-- tokens that it is charged, divided by the tenant's weight. The clock stands at the start of the request taken last, so that a tenant
-- that comes newly begins there. Outputs are charged as the tenant's last ones were; `settle` makes good for the difference.
local MOST_PRIORITY = 512
local TIME_SPAN = 2 ^ 40 -- tokens of virtual time, beyond which priorities begin
local MEAN_OF = 16 -- ends over which the length of a tenant's outputs is averaged

local TIERS = {priority = -1, flex = 1} -- service tiers that are taken before all others, and behind them

-- The score in ORDER: lower tiers first, then lower priority values, then earlier starts.
local function score_of(tier, priority, start)
  local rank = math.max(-MOST_PRIORITY, math.min(MOST_PRIORITY, tonumber(priority)))
  rank = rank + (TIERS[tier] or 0) * (2 * MOST_PRIORITY + 1)
  return string.format('%.0f', rank * TIME_SPAN + math.min(tonumber(start or 0), TIME_SPAN - 1))
end

-- A request ended: its tenant has used `cached` tokens less than it has put in, and `output` more; nothing, if it never ran.
local function settle(tenant, weight, charged, ran, n, prompt, cached, output)
  local used = 0
  if ran then used = prompt - cached + output end
  if output > 0 then
    local mean = tonumber(redis.call('HGET', FAIR, 'mean:' .. tenant))
    local each = output / n
    redis.call('HSET', FAIR, 'mean:' .. tenant, string.format('%.3f', mean and mean + (each - mean) / MEAN_OF or each))
  end
  local difference = math.floor((used - charged) / weight)
  if difference ~= 0 then redis.call('HINCRBY', FAIR, 'finish:' .. tenant, string.format('%.0f', difference)) end
end

-- The value of a field in the flat list that a stream entry or HGETALL gives.
local function field_of(flat, name)
  for i = 1, #flat, 2 do
    if flat[i] == name then return flat[i + 1] end
  end
  return nil
end

-- id and payload of an entry; nil where another program trimmed it away.
local function read_entry(entry)
  local found = redis.call('XRANGE', REQUESTS, entry, entry)
  if #found == 0 then return nil, nil end
  return field_of(found[1][2], 'id'), field_of(found[1][2], 'payload')
end

-- The id of the live request that an entry belonged to which is gone. Slow, and only for that.
local function find_by_entry(entry)
  for _, id in ipairs(redis.call('ZRANGE', LIVE, 0, -1)) do
    if redis.call('HGET', RECORD .. id, 'entry') == entry then return id end
  end
  return nil
end

-- One usage line: who, when, how it ended, and its tokens. A prompt counts, whole, when its request had a first token (docs/metrics.md).
local function add_usage(id)
  local record = redis.call('HMGET', RECORD .. id, 'tenant', 'reason', 'prompt_tokens', 'cached_tokens', 'output_tokens', 'first_token')
  local answered = record[6] and tonumber(record[6]) > 0
  redis.call('XADD', USAGE, '*',
    'day', string.format('%d', math.floor(tonumber(NOW) / 86400)),
    'tenant', record[1] or '',
    'reason', record[2] or '',
    'prompt_tokens', answered and record[3] or '0',
    'cached_tokens', answered and record[4] or '0',
    'output_tokens', record[5] or '0')
end

-- The index of a client-given id goes with the last of the records under it. Of each id EXTERNALS counts the live requests, and has
-- when the last record of those that ended goes.
local function expire_external(external_id, retention)
  local live, last = 'live:' .. external_id, 'last:' .. external_id
  local goes = math.max(CLOCK + tonumber(retention), tonumber(redis.call('HGET', EXTERNALS, last) or 0))
  if redis.call('HINCRBY', EXTERNALS, live, -1) > 0 then
    redis.call('HSET', EXTERNALS, last, string.format('%.0f', goes))
  else
    redis.call('HDEL', EXTERNALS, live, last)
    redis.call('PEXPIREAT', EXTERNAL .. external_id, string.format('%.0f', goes))
  end
end

-- A new request under the id: its index stays.
local function keep_external(external_id)
  redis.call('HINCRBY', EXTERNALS, 'live:' .. external_id, 1)
  local left = redis.call('PTTL', EXTERNAL .. external_id)
  if left > 0 then
    redis.call('HSET', EXTERNALS, 'last:' .. external_id, string.format('%.0f', CLOCK + left))
    redis.call('PERSIST', EXTERNAL .. external_id)
  end
end

local LARGE_OUTLINE = 16384 -- bytes, of a request that ended without an output, which count as one

-- Results of ended requests, their outputs and what their answers are written from, share a budget of bytes: the oldest ones give
-- way. KEPT lists them in the order of their ends, as `<bytes> <id>`; LOAD has their sum.
local function drop_oldest_output()
  local oldest = redis.call('LPOP', KEPT)
  if not oldest then return false end
  local size, id = string.match(oldest, '^(%d+) (.*)$')
  add_sum('kept', -tonumber(size))
  if redis.call('HDEL', RECORD .. id, 'output', 'outline') > 0 then redis.call('HSET', RECORD .. id, 'output_dropped', '1') end
  return true
end

-- Results whose records ran out take no room: each end looks at the two oldest.
local function forget_oldest_outputs()
  for _ = 1, 2 do
    local oldest = redis.call('LINDEX', KEPT, 0)
    if not oldest or redis.call('EXISTS', RECORD .. string.match(oldest, '^%d+ (.*)$')) == 1 then return end
    drop_oldest_output()
  end
end

local function count_kept(id)
  local size = redis.call('HSTRLEN', RECORD .. id, 'output') + redis.call('HSTRLEN', RECORD .. id, 'outline')
  redis.call('RPUSH', KEPT, string.format('%d', size) .. ' ' .. id)
  add_sum('kept', size)
end

local function keep_output(id, budget)
  forget_oldest_outputs()
  if redis.call('HSTRLEN', RECORD .. id, 'output') == 0 then return end
  count_kept(id)
  while tonumber(redis.call('HGET', LOAD, 'kept') or 0) > budget and drop_oldest_output() do end
end

-- Out of the queue, wherever in it: nobody may take it any more.
local function leave_queue(id, entry, record_tenant, n, tokens, fingerprint)
  redis.call('ZREM', ORDER, order_member(entry))
  if fingerprint then
    redis.call('ZREM', RESUME .. fingerprint, order_member(entry))
    redis.call('ZREM', ORPHANS, id)
    add_sum('orphans', -n)
  end
  add_waiting(record_tenant, n, tokens, -1)
end

-- A running request waits again, for an engine of its fingerprint, before all others: its engine does not go on with it.
local function make_orphan(id, entry)
  local record = redis.call('HMGET', RECORD .. id, 'tenant', 'n', 'prompt_tokens', 'fingerprint', 'priority', 'start', 'engine', 'tier')
  redis.call('XACK', REQUESTS, GROUP, entry)
  redis.call('HSET', RECORD .. id, 'state', 'queued')
  add_height(record[7], -tonumber(record[2]))
  add_sum('orphans', tonumber(record[2]))
  redis.call('ZADD', RESUME .. (record[4] or ''), score_of(record[8], record[5] or 0, record[6]), order_member(entry))
  redis.call('ZADD', ORPHANS, NOW, id)
  add_waiting(record[1], tonumber(record[2]), tonumber(record[3]), 1)
end

-- The group with the pending lists, made anew from what records say of who runs what. Somebody has destroyed it (XGROUP DESTROY).
local function restore_group()
  redis.call('XGROUP', 'CREATE', REQUESTS, GROUP, '0', 'MKSTREAM')
  for _, id in ipairs(redis.call('ZRANGE', LIVE, 0, -1)) do
    local record = redis.call('HMGET', RECORD .. id, 'state', 'engine', 'entry')
    if record[1] == 'running' then redis.call('XCLAIM', REQUESTS, GROUP, CONSUMER .. record[2], 0, record[3], 'FORCE') end
  end
end

-- A command that needs the group.
local function call_group(command, ...)
  local answer = redis.pcall(command, REQUESTS, GROUP, ...)
  if not answer.err then return answer end
  if string.find(answer.err, 'NOGROUP', 1, true) then restore_group() end
  return redis.call(command, REQUESTS, GROUP, ...)
end

-- A request becomes a slot's: on its consumer's pending list, and by its record.
local function give_to(id, entry, slot, incarnation, fingerprint, consumer)
  local claimed = call_group('XCLAIM', consumer, 0, entry, 'FORCE')
  if #claimed == 0 or not claimed[1] then return false end
  local journal = slot .. ':' .. incarnation
  local record = redis.call('HMGET', RECORD .. id, 'journals', 'state', 'n')
  local journals = record[1]
  if record[2] ~= 'running' then add_height(slot, tonumber(record[3])) end
  if not journals then
    journals = journal
  elseif not string.find(' ' .. journals .. ' ', ' ' .. journal .. ' ', 1, true) then
    journals = journals .. ' ' .. journal
  end
  redis.call('HSET', RECORD .. id, 'state', 'running', 'engine', slot, 'incarnation', incarnation, 'fingerprint', fingerprint,
    'journals', journals)
  return true
end

-- The one way out of the ledger. `facts`: record fields of the end, flat. False: it had ended before, or never was.
-- The record is kept for as long as it says, whichever process ends the request.
local function end_request(id, facts)
  local key = RECORD .. id
  local record = redis.call('HMGET', key, 'state', 'entry', 'n', 'prompt_tokens', 'tenant', 'external_id', 'client', 'retention',
    'fingerprint', 'idempotency', 'engine', 'weight', 'charged')
  local state, entry, n, prompt, tenant = record[1], record[2], tonumber(record[3]), tonumber(record[4]), record[5]
  if not state or state == 'ended' then return false end
  if state == 'queued' then leave_queue(id, entry, tenant, n, prompt, record[9]) end
  if state == 'running' then add_height(record[11], -n) end
  settle(tenant, tonumber(record[12] or 1), tonumber(record[13] or 0), record[11], n, prompt,
    tonumber(field_of(facts, 'cached_tokens') or 0), tonumber(field_of(facts, 'output_tokens') or 0))
  add_request(tenant, record[7], n, -1)
  redis.call('XACK', REQUESTS, GROUP, entry)
  redis.call('XDEL', REQUESTS, entry)
  redis.call('ZREM', LIVE, id)
  redis.call('ZREM', DEADLINES, id)
  redis.call('DEL', OUTPUT .. id)
  redis.call('HSET', key, 'state', 'ended', 'finished', NOW, unpack(facts))
  redis.call('ZADD', ENDED, NOW, id)
  redis.call('PEXPIRE', key, record[8] or OLD_RETENTION)
  if record[10] then redis.call('PEXPIRE', record[10], record[8] or OLD_RETENTION) end
  expire_external(record[6], record[8] or OLD_RETENTION)
  if state == 'queued' and redis.call('HSTRLEN', key, 'outline') > LARGE_OUTLINE then count_kept(id) end
  add_usage(id)
  return true
end

-- Tell the API server that listens for the request; the engine cannot. The array is protocol.RequestEnded, tag first.
local function publish_ended(id, client_channel, reason, error)
  local record = redis.call('HMGET', RECORD .. id, 'client', 'handle')
  if not record[1] or record[1] == '' then return end
  local message = {2, id, tonumber(record[2]), tonumber(reason)}
  if error ~= '' then message[5] = error end
  redis.call('PUBLISH', client_channel .. record[1], cmsgpack.pack(message))
end

-- A request ends with an error that no engine tells; its API server hears of it. False: it had ended before.
local function end_in_error(id, client_channel, reason, error)
  if not end_request(id, {'reason', 'error', 'error', error}) then return false end
  publish_ended(id, client_channel, reason, error)
  return true
end

-- The error for an engine that may not write for a slot; nil: it may. UNOWNED means that Redis was wiped: the engine takes its slot again.
local function not_owner(owner_key, incarnation)
  local owner = redis.call('GET', owner_key)
  if owner == incarnation then return nil end
  if not owner then return redis.error_reply('UNOWNED the slot has no owner') end
  return redis.error_reply('FENCED the slot is owned by another incarnation')
end
