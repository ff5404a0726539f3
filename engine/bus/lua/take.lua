-- take: the requests that are next become the caller's.
--
-- KEYS ledger, then owner, progress of the slot, shares, prefix of slots
-- ARGV slot, incarnation, fingerprint, count, call number, prefix of consumers, places: how many more the caller could run, share's time
--      to live in ms, may it have a suspect (0, 1)
-- Answer: a list of entry, payload, when it was enqueued and taken (epoch seconds), API server and handle that it is attached to; and of
-- an orphan its attachments, the journals with its output, the commands that no engine has obeyed, its deaths in a row,
-- its cached tokens, and when it was first scheduled and had its first token.
--
-- Orphans of the caller's fingerprint come before all others, whatever the share: their clients wait in mid-stream. One that two
-- engines died of in a row is a suspect, and runs beside no other suspect.
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
-- Sent twice (the answer was lost): calls are numbered. The number of the last take gets its entries again, a lower one nothing.

local OWNER, PROGRESS, SHARES, ANY_SLOT = KEYS[OWN_KEYS + 1], KEYS[OWN_KEYS + 2], KEYS[OWN_KEYS + 3], KEYS[OWN_KEYS + 4]
local slot, incarnation, fingerprint, count, number, any_consumer, places, share_ttl, may_suspect = unpack(ARGV)
local consumer = any_consumer .. slot
local SUSPECT = 2 -- deaths in a row

local refused = not_owner(OWNER, incarnation)
if refused then return refused end

local function orders_of(id)
  local flat, found = redis.call('HGETALL', RECORD .. id), {}
  for i = 1, #flat, 2 do
    if string.sub(flat[i], 1, 7) == 'finish:' then found[#found + 1] = flat[i + 1] end
  end
  return found
end

local function describe(id, entry, payload)
  local record = redis.call('HMGET', RECORD .. id, 'enqueued', 'received', 'client', 'handle', 'attachments', 'journals',
    'attempts', 'cached_tokens', 'scheduled', 'first_token')
  local answer = {entry, payload, record[1], record[2], record[3] or '', record[4] or ''}
  local journal = slot .. ':' .. incarnation
  if record[6] and record[6] ~= journal then
    answer[7], answer[8], answer[9] = record[5] or (record[3] .. ':' .. record[4]), record[6], orders_of(id)
    for i = 7, 10 do answer[i + 3] = record[i] or '0' end
  end
  return answer
end

-- What the last take gave and no flush has ended yet.
local function taken_before()
  local answer = {}
  for entry in string.gmatch(redis.call('HGET', PROGRESS, 'taken') or '', '%S+') do
    local id, payload = read_entry(entry)
    if payload and redis.call('HGET', RECORD .. id, 'incarnation') == incarnation then
      answer[#answer + 1] = describe(id, entry, payload)
    end
  end
  return answer
end

local last = tonumber(redis.call('HGET', PROGRESS, 'call') or 0)
if tonumber(number) == last then return taken_before() end
if tonumber(number) < last then return {} end

local function claim(member)
  local entry = entry_of(member)
  local id, payload = read_entry(entry)
  if not id then
    local lost = find_by_entry(entry)
    if lost then end_request(lost, {'reason', 'error', 'error', 'the entry of the request is gone'}) end
    return nil
  end
  local record = redis.call('HMGET', RECORD .. id, 'tenant', 'prompt_tokens', 'n', 'fingerprint')
  if not record[1] then
    redis.call('XDEL', REQUESTS, entry)
    return nil
  end
  leave_queue(id, entry, record[1], tonumber(record[3]), tonumber(record[2]), record[4])
  give_to(id, entry, slot, incarnation, fingerprint, consumer)
  redis.call('HSET', RECORD .. id, 'received', NOW)
  return describe(id, entry, payload)
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
    if clock - tonumber(asked) <= tonumber(share_ttl) and redis.call('GET', ANY_SLOT .. said[i]) == holder then
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

local answer, entries = {}, {}

local function take(member)
  local taken = claim(member)
  if taken then
    answer[#answer + 1] = taken
    entries[#entries + 1] = taken[1]
  end
end

local function is_suspect(member)
  local id = read_entry(entry_of(member))
  return id and tonumber(redis.call('HGET', RECORD .. id, 'attempts') or 0) >= SUSPECT
end

local function take_orphans()
  for _, member in ipairs(redis.call('ZRANGE', RESUME .. fingerprint, 0, tonumber(count) - 1)) do
    if not is_suspect(member) then
      redis.call('ZREM', RESUME .. fingerprint, member)
      take(member)
    elseif may_suspect == '1' then
      may_suspect = '0'
      redis.call('ZREM', RESUME .. fingerprint, member)
      take(member)
    end
  end
end

if tonumber(count) > 0 then take_orphans() end
local waiting = redis.call('ZCARD', ORDER)
if waiting > 0 then
  local share = math.max(0, math.min(tonumber(count) - #answer, fair_share(waiting)))
  local popped = redis.call('ZPOPMIN', ORDER, share)
  for i = 1, #popped, 2 do take(popped[i]) end
end
say_places(tonumber(places) - #answer)
redis.call('HSET', PROGRESS, 'call', number, 'taken', table.concat(entries, ' '))
return answer
