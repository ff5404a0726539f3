-- Engines as vessels that requests are poured into, the lowest first. It stands before lua/take.lua.
--
-- A vessel has a height (choices in flight), places (choices that it could run more), room (tokens of its KV cache) and the newest
-- protocol version that it reads.

local PAGE = 8 -- vessels read at once
local POURED = 8 -- that a share is reckoned with one by one

local function reads(vessel, request) return vessel.version >= request.version end

local function has_room(vessel, request) return reads(vessel, request) and vessel.room >= request.tokens end

local function fits(vessel, request) return has_room(vessel, request) and vessel.places >= request.n end

-- Of what an engine said and when, and who lives in its slot now: its vessel; nil: it shares no more.
local function parse_vessel(slot, height, said, asked, holder, oldest)
  local incarnation, places, room, version = string.match(said or '', '^(%d+) (%d+) (-?%d+) (%d+)$')
  if not incarnation or incarnation ~= holder or not asked or tonumber(asked) < oldest then return nil end
  return {slot = slot, height = height, places = tonumber(places), room = tonumber(room), version = tonumber(version)}
end

-- A function that gives the i-th lowest vessel with places that is not the slot's own; nil: there are no more. It reads them as they are
-- asked for, so that a take costs the same among many engines as among few. Those that share no more leave TAKERS.
local function vessels_besides(own, shares, asked, any_slot, oldest)
  local found, passed, all_read = {}, 0, false

  local function read_page()
    local page, slots, holders = redis.call('ZRANGE', TAKERS, passed, passed + PAGE - 1, 'WITHSCORES'), {}, {}
    all_read = #page < 2 * PAGE
    for i = 1, #page, 2 do
      if tonumber(page[i + 1]) >= IN_LINE then all_read = true
      elseif page[i] == own then passed = passed + 1
      else
        slots[#slots + 1], holders[#holders + 1] = page[i], any_slot .. page[i]
        page[page[i]] = tonumber(page[i + 1])
      end
    end
    if #slots == 0 then return end
    local said, times = redis.call('HMGET', shares, unpack(slots)), redis.call('ZMSCORE', asked, unpack(slots))
    holders = redis.call('MGET', unpack(holders))
    for i, slot in ipairs(slots) do
      local vessel = parse_vessel(slot, page[slot], said[i], times[i], holders[i], oldest)
      if vessel then
        found[#found + 1], passed = vessel, passed + 1
      else
        redis.call('ZREM', TAKERS, slot)
      end
    end
  end

  return function(i)
    while i > #found and not all_read do read_page() end
    return found[i]
  end
end

-- How many of the `waiting` choices are one vessel's to take, where all are like `request`. Beyond POURED others that have room for it,
-- the rest of them are taken for as low as the last of these and without a bottom: the share is then too small rather than too large,
-- and grows as the lower ones fill.
local function fair_share(me, other_at, waiting, request)
  local mine = {height = me.height, places = has_room(me, request) and me.places or 0, many = 1}
  local sharers, seen = {mine}, 0
  while #sharers <= POURED do
    local other = other_at(seen + 1)
    if not other then break end
    seen = seen + 1
    if has_room(other, request) then sharers[#sharers + 1] = {height = other.height, places = other.places, many = 1} end
  end
  if other_at(seen + 1) then
    local among = tonumber(redis.call('ZSCORE', TAKERS, me.slot) or IN_LINE) < IN_LINE and 1 or 0
    sharers[#sharers + 1] = {height = sharers[#sharers].height, places = waiting, many = count_with_places() - seen - among}
  end
  local highest = 0
  for _, each in ipairs(sharers) do highest = math.max(highest, each.height + each.places) end
  local function below(level, each) return math.max(0, math.min(level - each.height, each.places)) end
  local function places_below(level)
    local sum = 0
    for _, each in ipairs(sharers) do sum = sum + each.many * below(level, each) end
    return sum
  end
  local surplus = waiting - places_below(highest)
  if surplus >= 0 then return below(highest, mine) + surplus end
  local low, high = 0, highest
  while low < high do
    local middle = math.floor((low + high) / 2)
    if places_below(middle) < waiting then low = middle + 1 else high = middle end
  end
  return below(low, mine)
end

-- The lowest other vessel that could run the request; nil: none could.
local function find_rival(other_at, request)
  local i = 1
  while true do
    local other = other_at(i)
    if not other or fits(other, request) then return other end
    i = i + 1
  end
end
