-- What the scripts that move requests share. It stands before each of them in the text that Redis gets (engine/bus/call.py).
--
-- KEYS 1-9 are the same in all. RECORD, EXTERNAL and TOMBSTONE are prefixes: which record an entry belongs to is known only once
-- the entry was read. They carry the model's hash tag, so that what is built from them lies in the slot that KEYS named.
--
-- The ledger: a request is queued (in ORDER), running (in the pending list of a consumer) or ended (neither). LIVE, LOAD and the
-- record's state change in the same script as that does.

local REQUESTS, ORDER, LIVE, ENDED, LOAD, USAGE, RECORD, EXTERNAL, TOMBSTONE = unpack(KEYS, 1, 9)
local GROUP = 'engines'

-- Epoch seconds with microseconds by Redis' clock, which is everybody's: those of the machines around it may differ by hours.
local TIME = redis.call('TIME')
local NOW = string.format('%d.%06d', TIME[1], TIME[2])
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
  add_sum('tokens', sign * tokens)
  add_sum('tokens:' .. tenant, sign * tokens)
end

-- `sign`: 1 for a request that comes, -1 for one that ended.
local function add_request(tenant, client, n, sign)
  add_sum('requests', sign * n)
  add_sum('requests:' .. tenant, sign * n)
  add_sum('client:' .. client, sign)
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

-- The index of a client-given id goes with the last record under it.
local function expire_external(external_id)
  local index, last = EXTERNAL .. external_id, 1
  for _, id in ipairs(redis.call('ZRANGE', index, 0, -1)) do
    if redis.call('ZSCORE', LIVE, id) then return end
    last = math.max(last, redis.call('PTTL', RECORD .. id))
  end
  redis.call('PEXPIRE', index, last)
end

-- The one way out of the ledger. `facts`: record fields of the end, flat. False: it had ended before, or never was.
-- The record is kept for as long as it says, whichever process ends the request.
local function end_request(id, facts)
  local key = RECORD .. id
  local record = redis.call('HMGET', key, 'state', 'entry', 'n', 'prompt_tokens', 'tenant', 'external_id', 'client', 'retention')
  local state, entry, tenant = record[1], record[2], record[5]
  if not state or state == 'ended' then return false end
  if state == 'queued' then
    redis.call('ZREM', ORDER, order_member(entry))
    add_waiting(tenant, tonumber(record[3]), tonumber(record[4]), -1)
  end
  add_request(tenant, record[7], tonumber(record[3]), -1)
  redis.call('XACK', REQUESTS, GROUP, entry)
  redis.call('XDEL', REQUESTS, entry)
  redis.call('ZREM', LIVE, id)
  redis.call('HSET', key, 'state', 'ended', 'finished', NOW, unpack(facts))
  redis.call('ZADD', ENDED, NOW, id)
  redis.call('PEXPIRE', key, record[8] or OLD_RETENTION)
  expire_external(record[6])
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

-- Whoever does not hold the slot may change nothing. An absent key fences too: a wipe must not let a zombie through.
local function fenced(slot_key, incarnation)
  return redis.call('GET', slot_key) ~= incarnation
end

local FENCED = 'FENCED the slot is not held by this incarnation'
