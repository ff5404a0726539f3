-- Which engines may take more, and how they are woken. It stands before the scripts that let requests wait, or give them away.
--
-- TAKERS has them, those with places first, the one with the fewest choices in flight first of all. Behind them, in the same order,
-- stand those that have none, but a line that is not full. What they said may be out of date: a wake-up is a hint. An engine that finds,
-- woken or not, that what waits is another one's wakes that one (lua/take.lua), and each engine looks several times a second besides.

local IN_LINE = 2 ^ 20 -- above the choices that any engine has in flight
local WITH_PLACES = '(' .. string.format('%d', IN_LINE) -- the upper bound of their scores
local MOST_WOKEN = 16 -- at once; each wakes the next while requests wait
local MOST_DEAF = 4 -- engines passed that do not listen

local function note_taker(slot, height, has_places, has_line)
  if has_places or has_line then
    redis.call('ZADD', TAKERS, has_places and height or IN_LINE + height, slot)
  else
    redis.call('ZREM', TAKERS, slot)
  end
end

local function count_with_places() return redis.call('ZCOUNT', TAKERS, '-inf', WITH_PLACES) end

local function wake(channel, slot) return redis.call('PUBLISH', channel .. slot, '') > 0 end

-- One engine for each of the `came` requests that came last. The lowest have been woken for those that waited before.
local function wake_for(channel, came)
  local choice = count_with_places()
  if choice == 0 then choice = redis.call('ZCARD', TAKERS) end
  if choice == 0 then return end
  local before, woken = redis.call('ZCARD', ORDER) - came, 0
  local wanted = math.min(came, choice, MOST_WOKEN)
  for passed = 0, math.min(choice, wanted + MOST_DEAF) - 1 do
    local rank = (before + passed) % choice
    if wake(channel, redis.call('ZRANGE', TAKERS, rank, rank)[1]) then woken = woken + 1 end
    if woken == wanted then return end
  end
end
