-- take: the requests that are next become the caller's.
--
-- KEYS 1-9 ledger, 10 slot, 11 what the slot took last, 12 who shares, 13 prefix of slots
-- ARGV slot, incarnation, count, nonce, prefix of consumers, places: how many more the caller could run, share's time to live in ms
-- Answer: a list of entry, payload, and when it was enqueued and taken (epoch seconds).
--
-- No more than the caller's fair share: engines are filled like vessels, the one with the fewest requests in flight first, each up to its
-- places. A sharer is a living engine that asked within the time to live of a share; an engine that sleeps, hangs or was full for so long
-- holds nothing back. Invariants, when all sharers have said their places and ask until no sharer gets a request:
--   no request waits while a sharer has places;
--   no engine takes more requests than it has places for, while another has places for them; the surplus beyond all places goes to the
--   engines that ask first;
--   an engine that took has at most one request in flight more than an engine that has places left.
-- Places are what the caller says (seats, and none while KV blocks are short), less what it took since; not `count`, which is less
-- while a step's worth is on its way to the scheduler, and more where a full engine keeps a line.
--
-- ZPOPMIN gives priorities, XCLAIM FORCE puts an entry that was never delivered on the caller's pending list, in any order. XREADGROUP >
-- must not be used beside it: it would deliver the same entries again.
-- Sent twice (the answer was lost): the nonce is that of the last take, whose entries are answered again.

local SLOT, TAKEN, SHARES, ANY_SLOT = KEYS[10], KEYS[11], KEYS[12], KEYS[13]
local TAKEN_TTL = 600000 -- ms
local slot, incarnation, count, nonce, any_consumer, places, share_ttl = unpack(ARGV)
local consumer = any_consumer .. slot

if fenced(SLOT, incarnation) then return redis.error_reply(FENCED) end

-- What the last take gave and no flush has ended yet.
local function taken_before()
  local answer = {}
  for entry in string.gmatch(redis.call('HGET', TAKEN, 'entries'), '%S+') do
    local id, payload = read_entry(entry)
    if payload then
      local times = redis.call('HMGET', RECORD .. id, 'enqueued', 'received')
      answer[#answer + 1] = {entry, payload, times[1], times[2]}
    end
  end
  return answer
end

if redis.call('HGET', TAKEN, 'nonce') == nonce then return taken_before() end

local function claim(member)
  local entry = entry_of(member)
  local claimed = redis.call('XCLAIM', REQUESTS, GROUP, consumer, 0, entry, 'FORCE')
  if #claimed == 0 or not claimed[1] then
    local lost = find_by_entry(entry)
    if lost then end_request(lost, {'reason', 'error', 'error', 'the entry of the request is gone'}) end
    return nil
  end
  local id = field_of(claimed[1][2], 'id')
  local record = redis.call('HMGET', RECORD .. id, 'tenant', 'prompt_tokens', 'enqueued', 'n')
  add_waiting(record[1], tonumber(record[4]), tonumber(record[2]), -1)
  redis.call('HSET', RECORD .. id, 'state', 'running', 'engine', slot, 'incarnation', incarnation, 'received', NOW)
  return {entry, field_of(claimed[1][2], 'payload'), record[3], NOW}
end

local clock = tonumber(TIME[1]) * 1000 + math.floor(tonumber(TIME[2]) / 1000)

local function say_places(number)
  redis.call('HSET', SHARES, slot, incarnation .. ' ' .. string.format('%d %d', math.max(0, number), clock))
end

-- Slot -> places, of everybody who shares, the caller among them.
local function sharers()
  local said, found = redis.call('HGETALL', SHARES), {}
  for i = 1, #said, 2 do
    local holder, its_places, asked = string.match(said[i + 1], '^(%d+) (%d+) (%d+)$')
    if clock - tonumber(asked) <= tonumber(share_ttl) and not fenced(ANY_SLOT .. said[i], holder) then
      found[said[i]] = tonumber(its_places)
    end
  end
  found[slot] = math.max(0, tonumber(places))
  return found
end

-- Consumer -> requests in flight.
local function in_flight()
  local found = {}
  for _, item in ipairs(redis.call('XPENDING', REQUESTS, GROUP)[4] or {}) do found[item[1]] = tonumber(item[2]) end
  return found
end

-- How many of the `waiting` requests are the caller's to take.
local function fair_share(waiting)
  local held, vessels, highest = in_flight(), {}, 0
  for number, its_places in pairs(sharers()) do
    local height = held[any_consumer .. number] or 0
    vessels[number] = {height, its_places}
    highest = math.max(highest, height + its_places)
  end
  local function below(level, vessel) return math.max(0, math.min(level - vessel[1], vessel[2])) end
  local function places_below(level)
    local sum = 0
    for _, vessel in pairs(vessels) do sum = sum + below(level, vessel) end
    return sum
  end
  local surplus = waiting - places_below(highest)
  if surplus >= 0 then return below(highest, vessels[slot]) + surplus end
  local low, high = 0, highest
  while low < high do
    local middle = math.floor((low + high) / 2)
    if places_below(middle) < waiting then low = middle + 1 else high = middle end
  end
  return below(low, vessels[slot])
end

local waiting = redis.call('ZCARD', ORDER)
local popped = {}
if waiting > 0 then
  popped = redis.call('ZPOPMIN', ORDER, math.max(0, math.min(tonumber(count), fair_share(waiting))))
end
local answer, entries = {}, {}
for i = 1, #popped, 2 do
  local taken = claim(popped[i])
  if taken then
    answer[#answer + 1] = taken
    entries[#entries + 1] = taken[1]
  end
end
say_places(tonumber(places) - #answer)
if #answer > 0 then
  redis.call('HSET', TAKEN, 'nonce', nonce, 'entries', table.concat(entries, ' '))
  redis.call('PEXPIRE', TAKEN, TAKEN_TTL)
end
return answer
