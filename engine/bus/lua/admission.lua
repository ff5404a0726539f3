-- What decides whether requests may come into the queue, and what a tenant is charged for them. It stands before the scripts that
-- enqueue.
--
-- ARGV of these begin with: most choices (-1: any), most waiting prompt tokens (-1: any), most waiting choices (-1: any), require an
-- engine, or one that lived lately (0, 1), share of maxmemory, prefix of wake channels. Of a request these read the fields of its record.

local LIMIT_ARGUMENTS = 6

local function read_limits(served)
  return {
    requests = ARGV[1], tokens = ARGV[2], waiting = ARGV[3], require_engine = ARGV[4], memory_share = ARGV[5], served = served,
  }
end

local function refused(reason, value, limit, id, of_tenant)
  return {'refused', reason, string.format('%d', value), string.format('%d', limit), id, of_tenant and '1' or '0'}
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

-- A tenant's part of the weights of all tenants that have requests, itself among them.
local function share_of(tenant, weight)
  local load, sum = redis.call('HGETALL', LOAD), weight
  for i = 1, #load, 2 do
    local other = string.match(load[i], '^requests:(.*)$')
    if other and other ~= tenant then sum = sum + tonumber(redis.call('HGET', FAIR, 'weight:' .. other) or 1) end
  end
  return weight / sum
end

-- A limit counts what all tenants have in the queue. Once that is used up, a tenant still gets its share of it, so that no tenant's
-- requests keep another's out. engine/client/admission.py foretells the same from older numbers.
local function check_limit(reason, most, sum, new, first)
  most = tonumber(most)
  if most < 0 then return nil end
  local weight, field = tonumber(first.weight or 1), sum .. ':' .. first.tenant
  local found = redis.call('HMGET', LOAD, sum, field)
  local value, own = tonumber(found[1] or 0) + new, tonumber(found[2] or 0) + new
  -- What waits is compared before the new requests come: however many they are, they may come to an empty queue.
  local function is_beyond(amount, limit) return amount > limit or (new == 0 and amount == limit) end
  if not is_beyond(value, most) then return nil end
  local share = share_of(first.tenant, weight)
  if share == 1 then return refused(reason, value, most, '') end
  if is_beyond(own, most * share) then return refused(reason, own, math.floor(most * share), '', true) end
  return nil
end

local function check_queue(requests, limits)
  local choices = 0
  for _, request in ipairs(requests) do choices = choices + tonumber(request.n) end
  return check_limit('max_num_queued_reqs', limits.requests, 'requests', choices, requests[1])
    or check_limit('max_num_queued_tokens', limits.tokens, 'tokens', 0, requests[1])
    or check_limit('max_queue_seconds', limits.waiting, 'waiting', 0, requests[1])
end

local function check_memory(share)
  local used, limit = memory_beyond(share)
  while used and drop_oldest_output() do used, limit = memory_beyond(share) end -- old results give way to new requests
  if used then return refused('memory', used, limit, '') end
  return nil
end

local function check_limits(requests, limits)
  if limits.require_engine == '1' and redis.call('EXISTS', limits.served) == 0 then return refused('no_engine', 0, 0, '') end
  return check_memory(limits.memory_share) or check_queue(requests, limits)
end

local FIRST_OUTPUT = 128 -- tokens that an output is taken for until the tenant's first one has ended
local LATE_CLOCK = TIME_SPAN / 4

-- Virtual time begins again while nothing waits; tenants keep what they are ahead.
local function turn_clock_back(clock)
  local flat = redis.call('HGETALL', FAIR)
  for i = 1, #flat, 2 do
    if string.sub(flat[i], 1, 7) == 'finish:' then
      redis.call('HSET', FAIR, flat[i], string.format('%.0f', math.max(0, tonumber(flat[i + 1]) - clock)))
    end
  end
  redis.call('HSET', FAIR, 'clock', '0')
end

-- What a request is charged before it has run.
local function expected_tokens(request, mean)
  local output = math.min(tonumber(request.max_tokens), mean)
  return math.floor(tonumber(request.prompt_tokens) + tonumber(request.n) * output)
end

-- When a request last came of another tenant than the one before: take keeps places while several tenants send requests.
local function note_tenant(tenant)
  local before = redis.call('HGET', FAIR, 'newest')
  if before == tenant then return end
  redis.call('HSET', FAIR, 'newest', tenant)
  if before then redis.call('HSET', FAIR, 'changed', NOW) end
end

-- Each request begins where its tenant's last one ends, but no earlier than the clock; nor than one of the tenant's that waits, so that
-- a tenant's requests stay in the order of their arrival whatever was given back for those that ended.
local function charge(requests)
  local clock = tonumber(redis.call('HGET', FAIR, 'clock') or 0)
  if clock > LATE_CLOCK and redis.call('ZCARD', ORDER) == 0 then
    turn_clock_back(clock)
    clock = 0
  end
  local tenants = {}
  for _, request in ipairs(requests) do
    local tenant, weight = request.tenant, tonumber(request.weight or 1)
    local its = tenants[tenant]
    if not its then
      local stored = redis.call('HMGET', FAIR, 'finish:' .. tenant, 'last:' .. tenant, 'mean:' .. tenant)
      local waits = redis.call('HEXISTS', LOAD, 'waiting:' .. tenant) == 1
      its = {
        finish = tonumber(stored[1] or 0),
        last = waits and tonumber(stored[2] or 0) or 0,
        mean = tonumber(stored[3] or FIRST_OUTPUT),
        weight = request.weight or '1',
      }
      tenants[tenant] = its
    end
    local charged = expected_tokens(request, its.mean)
    its.last = math.max(clock, its.finish, its.last)
    its.finish = its.last + math.floor(charged / weight)
    request.start, request.charged = string.format('%.0f', its.last), string.format('%.0f', charged)
  end
  note_tenant(requests[1].tenant)
  for tenant, its in pairs(tenants) do
    redis.call('HSET', FAIR, 'finish:' .. tenant, string.format('%.0f', its.finish), 'last:' .. tenant, string.format('%.0f', its.last),
      'weight:' .. tenant, its.weight)
  end
end

-- The deadlines of the record: for all of it, and for its wait.
local function add_deadlines(request)
  local function after(seconds) return seconds and string.format('%.6f', tonumber(NOW) + tonumber(seconds)) end
  local deadline, wait_until = after(request.timeout), after(request.queue_timeout)
  if deadline then redis.call('HSET', RECORD .. request.id, 'deadline', deadline) end
  if wait_until then redis.call('HSET', RECORD .. request.id, 'wait_until', wait_until) end
  if not wait_until or (deadline and tonumber(deadline) < tonumber(wait_until)) then wait_until = deadline end
  if wait_until then note_deadline(request.id, wait_until) end
end
