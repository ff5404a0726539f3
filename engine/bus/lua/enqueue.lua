-- enqueue: a list of requests becomes entries of the stream, each with its record and its place in the order; all of them or none.
--
-- KEYS 1-9 ledger, 10 slots, 11 prefix of slots
-- ARGV most choices (-1: any), most waiting prompt tokens (-1: any), require an engine (0, 1), share of maxmemory, wake channel,
--      number of requests; of each: id, payload, number of field names and values, these
-- Answer: ok and the entries, or refused, reason, measured value, limit, request id.
--
-- Sent twice: requests that stand there with the same API server and handle are answered with their entries.

local SLOTS, SLOT = KEYS[10], KEYS[11]
local EXTERNAL_LOOKED_AT = 8 -- oldest entries of a full index that one request looks at
local max_requests, max_tokens, require_engine, memory_share, wake = unpack(ARGV, 1, 5)

local function refused(reason, value, limit, id)
  return {'refused', reason, string.format('%d', value), string.format('%d', limit), id}
end

local function parse_requests()
  local requests, at = {}, 7
  for i = 1, tonumber(ARGV[6]) do
    local length = tonumber(ARGV[at + 2])
    local fields = {unpack(ARGV, at + 3, at + 2 + length)}
    requests[i] = {id = ARGV[at], payload = ARGV[at + 1], fields = fields}
    for j = 1, length, 2 do requests[i][fields[j]] = fields[j + 1] end
    at = at + 3 + length
  end
  return requests
end

-- The entries of requests that were enqueued by an earlier sending; or a refusal; or neither.
local function known_already(requests)
  local entries = {'ok'}
  for _, request in ipairs(requests) do
    local record = redis.call('HMGET', RECORD .. request.id, 'client', 'handle', 'entry')
    if record[1] == request.client and record[2] == request.handle then
      entries[#entries + 1] = record[3]
    elseif record[1] then
      return refused('duplicate', 0, 0, request.id)
    elseif redis.call('EXISTS', TOMBSTONE .. request.id) == 1 then
      return refused('aborted', 0, 0, request.id)
    end
  end
  if #entries == 1 then return nil end
  if #entries <= #requests then return refused('duplicate', 0, 0, requests[1].id) end
  return entries
end

local function engine_lives()
  for _, number in ipairs(redis.call('SMEMBERS', SLOTS)) do
    if redis.call('EXISTS', SLOT .. number) == 1 then return true end
  end
  return false
end

local function check_limits(requests)
  if require_engine == '1' and not engine_lives() then return refused('no_engine', 0, 0, '') end
  local used, limit = memory_beyond(memory_share)
  if used then return refused('memory', used, limit, '') end
  local load = redis.call('HMGET', LOAD, 'requests', 'tokens')
  local choices, tokens = tonumber(load[1] or 0), tonumber(load[2] or 0)
  for _, request in ipairs(requests) do choices = choices + tonumber(request.n) end
  if tonumber(max_requests) >= 0 and choices > tonumber(max_requests) then
    return refused('max_num_queued_reqs', choices, tonumber(max_requests), '')
  end
  if tonumber(max_tokens) >= 0 and tokens >= tonumber(max_tokens) then
    return refused('max_num_queued_tokens', tokens, tonumber(max_tokens), '')
  end
  return nil
end

-- An id that a client uses for ever must not fill Redis, but a live request is found under its id, however many share it: only what
-- has ended goes, looked for among the oldest.
local function trim_external(index)
  local excess = redis.call('ZCARD', index) - EXTERNAL_KEPT
  if excess <= 0 then return end
  for _, id in ipairs(redis.call('ZRANGE', index, 0, math.min(excess, EXTERNAL_LOOKED_AT) - 1)) do
    if not redis.call('ZSCORE', LIVE, id) then redis.call('ZREM', index, id) end
  end
end

local function add(request)
  local entry = redis.call('XADD', REQUESTS, '*', 'id', request.id, 'payload', request.payload)
  redis.call('HSET', RECORD .. request.id, 'entry', entry, 'enqueued', NOW, unpack(request.fields))
  redis.call('ZADD', ORDER, request.priority, order_member(entry))
  redis.call('ZADD', LIVE, NOW, request.id)
  add_request(request.tenant, request.client, tonumber(request.n), 1)
  add_waiting(request.tenant, tonumber(request.n), tonumber(request.prompt_tokens), 1)
  local index = EXTERNAL .. request.external_id
  redis.call('ZADD', index, NOW, request.id)
  trim_external(index)
  redis.call('PERSIST', index)
  return entry
end

local requests = parse_requests()
local answer = known_already(requests) or check_limits(requests)
if answer then return answer end
if redis.call('EXISTS', REQUESTS) == 0 then
  redis.call('XGROUP', 'CREATE', REQUESTS, GROUP, '0', 'MKSTREAM')
end
answer = {'ok'}
for _, request in ipairs(requests) do answer[#answer + 1] = add(request) end
redis.call('PUBLISH', wake, '')
return answer
