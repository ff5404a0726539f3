-- How a request gets its entry and record. It stands before the scripts that add requests.

local EXTERNAL_LOOKED_AT = 8 -- oldest entries of a full index that one request looks at

-- A client may use one id for ever, and must not fill Redis with it. Live requests stay in the index, however many share the id. Of
-- the oldest members, those that have ended go.
local function trim_external(index)
  local excess = redis.call('ZCARD', index) - EXTERNAL_KEPT
  if excess <= 0 then return end
  for _, id in ipairs(redis.call('ZRANGE', index, 0, math.min(excess, EXTERNAL_LOOKED_AT) - 1)) do
    if not redis.call('ZSCORE', LIVE, id) then redis.call('ZREM', index, id) end
  end
end

-- The first request of a list stands for all under their Idempotency-Key.
local function note_idempotency(id, key, body_hash)
  if key then redis.call('SET', key, body_hash .. ' ' .. id, 'NX') end
end

-- A new request's record and its entry in the stream.
local function write_entry(id, payload, fields)
  if redis.call('EXISTS', REQUESTS) == 0 then
    redis.call('XGROUP', 'CREATE', REQUESTS, GROUP, '0', 'MKSTREAM')
  end
  local entry = redis.call('XADD', REQUESTS, '*', 'id', id, 'payload', payload)
  redis.call('HSET', RECORD .. id, 'entry', entry, 'enqueued', NOW, unpack(fields))
  return entry
end

-- The entry of a new request, with its record, on no list of what waits or runs yet. `fields`: of the record, flat.
local function add_entry(id, payload, fields)
  local entry = write_entry(id, payload, fields)
  redis.call('ZADD', LIVE, NOW, id)
  note_idempotency(id, field_of(fields, 'idempotency'), field_of(fields, 'body_hash'))
  local external_id = field_of(fields, 'external_id')
  local index = EXTERNAL .. external_id
  redis.call('ZADD', index, NOW, id)
  trim_external(index)
  keep_external(external_id)
  return entry
end

-- API server and handle of a record's first stream, by its fields; nil: there is no record.
local function first_attachment(client, handle, attachments)
  return client and string.match(attachments or (client .. ':' .. handle), '^%S+')
end

-- Requests out of ARGV, from `at` on: their number; of each id, payload, number of field names and values, these.
local function parse_requests(at)
  local requests = {}
  local count = tonumber(ARGV[at])
  at = at + 1
  for i = 1, count do
    local length = tonumber(ARGV[at + 2])
    local fields = {unpack(ARGV, at + 3, at + 2 + length)}
    requests[i] = {id = ARGV[at], payload = ARGV[at + 1], fields = fields}
    for j = 1, length, 2 do requests[i][fields[j]] = fields[j + 1] end
    at = at + 3 + length
  end
  return requests
end
