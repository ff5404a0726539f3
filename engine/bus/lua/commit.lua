-- commit: a list of requests that were staged is enqueued, whole or not at all.
--
-- KEYS ledger, then served, staged
-- ARGV limits (lua/admission.lua), API server, number of requests; of each: id, handle
-- Answer: as of `enqueue`.
--
-- All are of one HTTP request: tenant, API server and client-given id are those of the first. Sent twice: as of `enqueue`.

local STAGED = KEYS[OWN_KEYS + 2]
local client, count = unpack(ARGV, LIMIT_ARGUMENTS + 1, LIMIT_ARGUMENTS + 2)
local FIELDS = {'state', 'handle', 'client', 'entry', 'tenant', 'n', 'prompt_tokens', 'max_tokens', 'weight', 'priority', 'tier', 'timeout',
  'queue_timeout', 'attachments', 'external_id', 'idempotency', 'body_hash'}
local AT_ONCE = 1000 -- values that Lua can hand to one call

local function read_request(id)
  local values, request = redis.call('HMGET', RECORD .. id, unpack(FIELDS)), {id = id}
  for i, name in ipairs(FIELDS) do request[name] = values[i] or nil end
  return request
end

-- The requests, all staged; or an answer.
local function find_requests()
  local requests, answer = {}, {'ok', 0}
  for i = 1, tonumber(count) do
    local id, handle = ARGV[LIMIT_ARGUMENTS + 1 + 2 * i], ARGV[LIMIT_ARGUMENTS + 2 + 2 * i]
    local request = read_request(id)
    if redis.call('EXISTS', TOMBSTONE .. id) == 1 then return nil, refused('aborted', 0, 0, id) end
    local first = first_attachment(request.client, request.handle, request.attachments)
    if first ~= client .. ':' .. handle then return nil, refused('duplicate', 0, 0, id) end
    if request.state == 'staged' then requests[#requests + 1] = request else answer[#answer + 1] = request.entry end
  end
  if #requests == 0 then return nil, answer end
  if #requests < tonumber(count) then return nil, refused('duplicate', 0, 0, requests[1].id) end
  return requests, nil
end

-- One command for many requests, with the values that `each` gives for a request.
local function call_for_all(requests, command, key, each)
  local values = {}
  local function flush()
    if #values > 0 then redis.call(command, key, unpack(values)) end
    values = {}
  end
  for _, request in ipairs(requests) do
    for _, value in ipairs(each(request)) do values[#values + 1] = value end
    if #values >= AT_ONCE then flush() end
  end
  flush()
end

local function commit(requests)
  local first, choices, tokens = requests[1], 0, 0
  charge(requests)
  for _, request in ipairs(requests) do
    redis.call('HSET', RECORD .. request.id, 'state', 'queued', 'enqueued', NOW, 'start', request.start, 'charged', request.charged)
    redis.call('PERSIST', RECORD .. request.id)
    add_deadlines(request)
    choices, tokens = choices + tonumber(request.n), tokens + tonumber(request.prompt_tokens)
    keep_external(request.external_id)
  end
  call_for_all(requests, 'ZADD', ORDER, function(each) return {score_of(each.tier, each.priority, each.start), order_member(each.entry)} end)
  call_for_all(requests, 'ZADD', LIVE, function(each) return {NOW, each.id} end)
  call_for_all(requests, 'ZADD', EXTERNAL .. first.external_id, function(each) return {NOW, each.id} end)
  call_for_all(requests, 'ZREM', STAGED, function(each) return {each.entry} end)
  trim_external(EXTERNAL .. first.external_id)
  note_idempotency(first.id, first.idempotency, first.body_hash)
  add_sum('requests', choices)
  add_sum('requests:' .. first.tenant, choices)
  add_sum('client:' .. client, #requests)
  add_waiting(first.tenant, choices, tokens, 1)
end

local requests, answer = find_requests()
answer = answer or repeats(requests[1]) or check_limits(requests, read_limits(KEYS[OWN_KEYS + 1]))
if answer then return answer end
commit(requests)
answer = {'ok', redis.call('ZRANK', ORDER, order_member(requests[1].entry))}
for _, request in ipairs(requests) do answer[#answer + 1] = request.entry end
wake_for(ARGV[LIMIT_ARGUMENTS], #requests)
return answer
