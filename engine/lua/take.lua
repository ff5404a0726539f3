-- take: the requests that are next become the caller's.
--
-- KEYS 1-9 ledger, 10 slot, 11 what the slot took last, 12 who shares, 13 prefix of slots
-- ARGV slot, incarnation, count, nonce, now, prefix of consumers, most requests that the caller runs at once, share's time to live in ms
-- Answer: a list of entry and payload.
--
-- No more than the caller's fair share: what waits is thought to be poured over the sharers, each standing at the height of what it has in
-- flight and filled no higher than it can run at once; the caller may fill itself up to the level that comes of it. A sharer is a living
-- engine that asked within the time to live of a share: who sleeps, hangs or was full for so long holds nothing back. While anything
-- waits, somebody stands below the level; where all will be full, each takes what it has room for.
--
-- ZPOPMIN gives priorities, XCLAIM FORCE puts an entry that was never delivered on the caller's pending list, in any order. XREADGROUP >
-- must not be used beside it: it would deliver the same entries again.
-- Sent twice (the answer was lost): the nonce is that of the last take, whose entries are answered again.

local SLOT, TAKEN, SHARES, ANY_SLOT = KEYS[10], KEYS[11], KEYS[12], KEYS[13]
local TAKEN_TTL, LOST_RETENTION = 600000, 3600000 -- ms
local slot, incarnation, count, nonce, now, any_consumer, most, share_ttl = unpack(ARGV)
local consumer = any_consumer .. slot

if fenced(SLOT, incarnation) then return redis.error_reply(FENCED) end

-- What the last take gave and no flush has ended yet.
local function taken_before()
  local answer = {}
  for entry in string.gmatch(redis.call('HGET', TAKEN, 'entries'), '%S+') do
    local _, payload = read_entry(entry)
    if payload then answer[#answer + 1] = {entry, payload} end
  end
  return answer
end

if redis.call('HGET', TAKEN, 'nonce') == nonce then return taken_before() end

local function claim(member)
  local entry = entry_of(member)
  local claimed = redis.call('XCLAIM', REQUESTS, GROUP, consumer, 0, entry, 'FORCE')
  if #claimed == 0 or not claimed[1] then
    local lost = find_by_entry(entry)
    if lost then end_request(lost, {'reason', 'error', 'error', 'the entry of the request is gone'}, now, LOST_RETENTION) end
    return nil
  end
  local id = field_of(claimed[1][2], 'id')
  local record = redis.call('HMGET', RECORD .. id, 'tenant', 'prompt_tokens')
  add_tokens(record[1], -tonumber(record[2]))
  redis.call('HSET', RECORD .. id, 'state', 'running', 'engine', slot, 'incarnation', incarnation, 'received', now)
  return {entry, field_of(claimed[1][2], 'payload')}
end

-- Slot -> most requests at once, of everybody who shares, the caller among them.
local function sharers()
  local time = redis.call('TIME')
  local clock = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  redis.call('HSET', SHARES, slot, incarnation .. ' ' .. most .. ' ' .. string.format('%d', clock))
  local said, found = redis.call('HGETALL', SHARES), {}
  for i = 1, #said, 2 do
    local holder, its_most, asked = string.match(said[i + 1], '^(%d+) (%d+) (%d+)$')
    if clock - tonumber(asked) <= tonumber(share_ttl) and not fenced(ANY_SLOT .. said[i], holder) then
      found[said[i]] = tonumber(its_most)
    end
  end
  return found
end

-- Consumer -> requests in flight.
local function in_flight()
  local found = {}
  for _, item in ipairs(redis.call('XPENDING', REQUESTS, GROUP)[4] or {}) do found[item[1]] = tonumber(item[2]) end
  return found
end

-- How many of the `waiting` requests are the caller's to take, if it has room for them.
local function fair_share(waiting)
  local held, places, highest = in_flight(), {}, 0
  for number, its_most in pairs(sharers()) do
    places[number] = {held[any_consumer .. number] or 0, its_most}
    highest = math.max(highest, its_most)
  end
  local function below(level, place) return math.max(0, math.min(level, place[2]) - place[1]) end
  local function room_below(level)
    local sum = 0
    for _, place in pairs(places) do sum = sum + below(level, place) end
    return sum
  end
  if room_below(highest) < waiting then return waiting end -- all will be full
  local low, high = 0, highest
  while low < high do
    local middle = math.floor((low + high) / 2)
    if room_below(middle) < waiting then low = middle + 1 else high = middle end
  end
  return below(low, places[slot])
end

local answer, entries = {}, {}
local waiting = redis.call('ZCARD', ORDER)
if waiting == 0 then
  sharers()
  return answer
end
local popped = redis.call('ZPOPMIN', ORDER, math.max(0, math.min(tonumber(count), fair_share(waiting))))
for i = 1, #popped, 2 do
  local taken = claim(popped[i])
  if taken then
    answer[#answer + 1] = taken
    entries[#entries + 1] = taken[1]
  end
end
if #answer > 0 then
  redis.call('HSET', TAKEN, 'nonce', nonce, 'entries', table.concat(entries, ' '))
  redis.call('PEXPIRE', TAKEN, TAKEN_TTL)
end
return answer
