-- enqueue: a list of requests becomes entries of the stream, each with its record and its place in the order; all of them or none.
--
-- KEYS ledger, then served
-- ARGV limits (lua/admission.lua), number of requests; of each: id, payload, number of field names and values, these
-- Answer: ok, how many requests wait before the first one, and the entries; or refused, reason, measured value, limit, request id, is it
-- the tenant's share of the limit that is used up (0, 1); or repeated, request id, hash of its body.
--
-- Sent twice: requests that stand there with the same first API server and handle are answered with their entries.
-- A long list comes by lua/stage.lua and lua/commit.lua.

-- The entries of requests that were enqueued by an earlier sending; or a refusal; or neither.
local function known_already(requests)
  local entries = {'ok', 0}
  for _, request in ipairs(requests) do
    local record = redis.call('HMGET', RECORD .. request.id, 'client', 'handle', 'entry', 'attachments')
    if first_attachment(record[1], record[2], record[4]) == request.client .. ':' .. request.handle then
      entries[#entries + 1] = record[3]
    elseif record[1] then
      return refused('duplicate', 0, 0, request.id)
    elseif redis.call('EXISTS', TOMBSTONE .. request.id) == 1 then
      return refused('aborted', 0, 0, request.id)
    end
  end
  if #entries == 2 then return nil end
  if #entries < #requests + 2 then return refused('duplicate', 0, 0, requests[1].id) end
  return entries
end

local function add(request)
  local entry = add_entry(request.id, request.payload, request.fields)
  redis.call('HSET', RECORD .. request.id, 'start', request.start, 'charged', request.charged)
  add_deadlines(request)
  redis.call('ZADD', ORDER, score_of(request.tier, request.priority, request.start), order_member(entry))
  add_request(request.tenant, request.client, tonumber(request.n), 1)
  add_waiting(request.tenant, tonumber(request.n), tonumber(request.prompt_tokens), 1)
  return entry
end

local requests = parse_requests(LIMIT_ARGUMENTS + 1)
local answer = known_already(requests) or repeats(requests[1]) or check_limits(requests, read_limits(KEYS[OWN_KEYS + 1]))
if answer then return answer end
charge(requests)
answer = {'ok', 0}
for _, request in ipairs(requests) do answer[#answer + 1] = add(request) end
answer[2] = redis.call('ZRANK', ORDER, order_member(answer[3]))
wake_for(ARGV[LIMIT_ARGUMENTS], #requests)
return answer
