-- enqueue: a list of requests becomes entries of the stream, each with its record and its place in the order; all of them or none.
--
-- KEYS ledger, then served
-- ARGV most choices (-1: any), most waiting prompt tokens (-1: any), require an engine, or one that lived lately (0, 1), share of maxmemory, wake channel,
--      number of requests; of each: id, payload, number of field names and values, these
-- Answer: ok and the entries; or refused, reason, measured value, limit, request id; or repeated, request id, hash of its body.
--
-- Sent twice: requests that stand there with the same API server and handle are answered with their entries.

local SERVED = KEYS[OWN_KEYS + 1]
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

-- The first request of an earlier HTTP request with the same Idempotency-Key. One that ended badly, or whose output has given way,
-- is computed again.
local function repeats(request)
  local value = request.idempotency and redis.call('GET', request.idempotency)
  if not value then return nil end
  local body_hash, id = string.match(value, '^(%S+) (%S+)$')
  local record = redis.call('HMGET', RECORD .. id, 'state', 'reason', 'output_dropped')
  local is_bad = record[2] == 'abort' or record[2] == 'error' or record[3]
  if not record[1] or (record[1] == 'ended' and is_bad) then
    redis.call('DEL', request.idempotency)
    return nil
  end
  return {'repeated', id, body_hash}
end

local function check_limits(requests)
  if require_engine == '1' and redis.call('EXISTS', SERVED) == 0 then return refused('no_engine', 0, 0, '') end
  local used, limit = memory_beyond(memory_share)
  while used and drop_oldest_output() do used, limit = memory_beyond(memory_share) end -- old results give way to new requests
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

local function add(request)
  local entry = add_entry(request.id, request.payload, request.fields)
  redis.call('ZADD', ORDER, request.priority, order_member(entry))
  add_request(request.tenant, request.client, tonumber(request.n), 1)
  add_waiting(request.tenant, tonumber(request.n), tonumber(request.prompt_tokens), 1)
  return entry
end

local requests = parse_requests()
local answer = known_already(requests) or repeats(requests[1]) or check_limits(requests)
if answer then return answer end
answer = {'ok'}
for _, request in ipairs(requests) do answer[#answer + 1] = add(request) end
redis.call('PUBLISH', wake, '')
return answer
