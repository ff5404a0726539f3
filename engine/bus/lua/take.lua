-- take: the requests that are next become the caller's.
--
-- KEYS ledger, then owner, progress of the slot, shares, when engines asked, prefix of slots
-- ARGV slot, incarnation, fingerprint, count: most choices to take, call number, prefix of consumers, places: how many more choices the
--      caller could run, share's time to live in ms, may it have a suspect (0, 1), room: tokens that its KV cache has blocks for,
--      error's number among the reasons, prefix of client channels, error of a request that is late, newest protocol version that the
--      caller reads, prefix of wake channels, deaths in a row that make a suspect
-- Answer: a list of entry, payload, when it was enqueued and taken (epoch seconds), API server and handle that it is attached to,
-- priority; and of an orphan its attachments, the journals with its output, the commands that no engine has obeyed, its deaths in a row,
-- its cached tokens, and when it was first scheduled and had its first token.
--
-- A request whose deadline passed while it waited ends here. One of a newer version is left to engines that read it, and only they
-- count as sharers of it.
--
-- Orphans of the caller's fingerprint come before all others, whatever the share: their clients wait in mid-stream. One that so
-- many engines died of in a row is a suspect, and runs beside no other suspect.
--
-- No more than the caller's fair share, counted in choices: engines are filled like vessels, the one with the fewest choices in flight
-- first, each up to its places. A sharer is a living engine that asked within the time to live of a share; an engine that sleeps, hangs
-- or was full for so long holds nothing back. Invariants, when all sharers have said their places and room and ask until no sharer gets
-- a request:
--   no request waits while a sharer has places and room for it;
--   no engine takes more choices than it has places for, while another has places for them; the surplus beyond all places goes to the
--   engines that ask first;
--   an engine that took has at most one request in flight more than an engine that has places left.
-- Where a request that is left belongs to a lower engine, or to one that can run what the caller cannot, the caller wakes that engine:
-- one that was woken and refuses, or takes less than all, passes the wake-up on.
-- Places are what the caller says (seats, and none while KV blocks are short), less what it took since; not `count`, which is less
-- while a step's worth is on its way to the scheduler, and more where a full engine keeps a line. A prompt that the caller has no room
-- for is left to an engine that has; where none has, it waits here, unless the caller has some room: then it waits in the caller's line.
--
-- XCLAIM FORCE puts an entry that was never delivered on the caller's pending list, in any order. XREADGROUP > must not be used beside
-- it: it would deliver the same entries again.
-- Sent twice (the answer was lost): calls are numbered. The number of the last take gets its entries again, a lower one nothing.

local OWNER, PROGRESS, SHARES, ASKED, ANY_SLOT = unpack(KEYS, OWN_KEYS + 1, OWN_KEYS + 5)
local slot, incarnation, fingerprint, count, number, any_consumer, places, share_ttl, may_suspect, room, error_reason, client_channel,
  late_error, version, wake_channel, suspect = unpack(ARGV)
local consumer = any_consumer .. slot
local SUSPECT_DEATHS = tonumber(suspect)
local SUSPECTS_PASSED = 256 -- that wait for their turn before other orphans

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
    'attempts', 'cached_tokens', 'scheduled', 'first_token', 'priority')
  local answer = {entry, payload, record[1], record[2], record[3] or '', record[4] or '', record[11] or '0'}
  local journal = slot .. ':' .. incarnation
  if record[6] and record[6] ~= journal then
    answer[8], answer[9], answer[10] = record[5] or (record[3] .. ':' .. record[4]), record[6], orders_of(id)
    for i = 7, 10 do answer[i + 4] = record[i] or '0' end
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

local oldest_ask = CLOCK - tonumber(share_ttl)
local other_at = vessels_besides(slot, SHARES, ASKED, ANY_SLOT, oldest_ask)
local me = {
  slot = slot, height = tonumber(redis.call('ZSCORE', HEIGHTS, slot) or 0), places = math.max(0, tonumber(places)),
  room = tonumber(room), version = tonumber(version),
}

local something_waits = redis.call('EXISTS', ORDER, RESUME .. fingerprint) > 0 -- engines look several times a second

local function is_past(time) return time and tonumber(time) < tonumber(NOW) end

-- A request that waits; nil where it cannot be taken, and is gone then. `queue`: the sorted set that it waits in.
local function look(queue, member)
  local entry = entry_of(member)
  local id, payload = read_entry(entry)
  if not id then
    local lost = find_by_entry(entry)
    if lost then end_request(lost, {'reason', 'error', 'error', 'the entry of the request is gone'}) end
    redis.call('ZREM', queue, member)
    return nil
  end
  local record = redis.call('HMGET', RECORD .. id, 'tenant', 'prompt_tokens', 'n', 'fingerprint', 'start', 'journals', 'wait_until',
    'deadline', 'attempts', 'version')
  if not record[1] then
    redis.call('ZREM', queue, member)
    redis.call('XDEL', REQUESTS, entry)
    return nil
  end
  if is_past(record[8]) or (not record[6] and is_past(record[7])) then -- an orphan's time for waiting is over
    end_request(id, {'reason', 'error', 'error', late_error})
    publish_ended(id, client_channel, error_reason, late_error)
    return nil
  end
  return {
    id = id, entry = entry, payload = payload, tenant = record[1], tokens = tonumber(record[2]), n = tonumber(record[3]),
    fingerprint = record[4], start = tonumber(record[5] or 0), deadline = record[8], attempts = tonumber(record[9] or 0),
    version = tonumber(record[10] or 1),
  }
end

local answer, entries, budget, newest_start = {}, {}, tonumber(count), 0

local function take(request)
  leave_queue(request.id, request.entry, request.tenant, request.n, request.tokens, request.fingerprint)
  give_to(request.id, request.entry, slot, incarnation, fingerprint, consumer)
  redis.call('HSET', RECORD .. request.id, 'received', NOW)
  note_deadline(request.id, request.deadline)
  budget = budget - request.n
  me.height, me.places, me.room = me.height + request.n, me.places - request.n, me.room - request.tokens
  answer[#answer + 1] = describe(request.id, request.entry, request.payload)
  entries[#entries + 1] = request.entry
end

-- Where no engine has room for a prompt, it may stand in line at one that has some, or nothing else to do.
local function may_stand_in_line() return me.room > 0 or me.height == 0 end

local function take_orphans()
  local queue = RESUME .. fingerprint
  for _, member in ipairs(redis.call('ZRANGE', queue, 0, budget - 1 + SUSPECTS_PASSED)) do
    if budget <= 0 or not may_stand_in_line() then return end
    local orphan = look(queue, member)
    if orphan and reads(me, orphan) and (orphan.attempts < SUSPECT_DEATHS or may_suspect == '1') then
      if orphan.attempts >= SUSPECT_DEATHS then may_suspect = '0' end
      take(orphan)
    end
  end
end

-- It may be the caller's although the share is none, where lower engines cannot run it.
local function is_lowest_for(request)
  if not fits(me, request) then return false end
  local rival = find_rival(other_at, request)
  return not rival or rival.height > me.height
end

local function share_of_caller(waiting, request)
  local share = math.min(budget, fair_share(me, other_at, waiting, request))
  if share <= 0 and is_lowest_for(request) then return request.n end
  return share
end

local function is_mine(request, share)
  if me.room >= request.tokens and (share >= request.n or me.places >= request.n) then return true end
  return not find_rival(other_at, request) and may_stand_in_line()
end

local SEATS_A_PLACE = 8 -- of how many seats one is kept
local LATELY = 60 -- seconds
local MOST_PASSED = 16 -- requests that others may pass: that tenant's requests begin near the clock, and so near the head

-- Places that the caller keeps from a tenant, so that a tenant with little in flight need not wait for the end of another's request:
-- one of eight seats, as far as tenants other than this one do not have as many. The tenant has no line at the caller then: it would
-- fill such a place. nil: none are kept, or it is the one with little in flight, or one tenant alone sent requests lately.
local function places_kept_from(tenant)
  local changed = redis.call('HGET', FAIR, 'changed')
  if not changed or tonumber(NOW) - tonumber(changed) > LATELY then return nil end
  local kept = math.floor((me.height + me.places) / SEATS_A_PLACE)
  local sums = redis.call('HMGET', LOAD, 'requests', 'waiting', 'requests:' .. tenant, 'waiting:' .. tenant)
  for i = 1, 4 do sums[i] = tonumber(sums[i] or 0) end
  local own = sums[3] - sums[4]
  if own < kept or kept == 0 then return nil end
  redis.call('ZADD', ASKED, CLOCK, slot)
  local engines = redis.call('ZCOUNT', ASKED, oldest_ask, '+inf')
  return math.max(0, kept - math.floor((sums[1] - sums[2] - own) / engines))
end

local function is_kept_from(tenant)
  local kept = places_kept_from(tenant)
  return kept and me.places <= kept
end

local MOST_UNREAD = 256 -- requests that the caller cannot read, and passes

local function take_fresh()
  local sums = redis.call('HMGET', LOAD, 'waiting', 'orphans')
  local waiting, share, passed, unread = tonumber(sums[1] or 0) - tonumber(sums[2] or 0), nil, 0, 0
  repeat
    local left, unread_before = passed + unread, unread -- what was left stands at the head
    for _, member in ipairs(redis.call('ZRANGE', ORDER, left, left + budget + MOST_PASSED - 1)) do
      local request = look(ORDER, member)
      if request and not reads(me, request) then
        unread = unread + 1
      elseif request then
        share = share or share_of_caller(waiting, request)
        if share <= 0 or not is_mine(request, share) then return end
        if is_kept_from(request.tenant) then
          passed = passed + 1
          if passed > MOST_PASSED then return end
        else
          take(request)
          share = share - request.n
          newest_start = math.max(newest_start, request.start)
        end
      end
    end
  until unread == unread_before or unread >= MOST_UNREAD
end

-- What the caller leaves must not wait until the engine that may have it looks.
local function wake_next()
  local head = redis.call('ZRANGE', ORDER, 0, 0)[1]
  if not head or not other_at(1) then return end
  local request = look(ORDER, head)
  local rival = request and find_rival(other_at, request)
  if rival and (rival.height < me.height or not fits(me, request)) then wake(wake_channel, rival.slot) end
end

local function say_places()
  redis.call('HSET', SHARES, slot, string.format('%s %d %.0f %s', incarnation, math.max(0, me.places), me.room, version))
  redis.call('ZADD', ASKED, CLOCK, slot)
  note_taker(slot, tonumber(redis.call('ZSCORE', HEIGHTS, slot) or 0), me.places > 0 and me.room > 0, budget > 0)
end

if something_waits and budget > 0 then take_orphans() end
if something_waits and budget > 0 then take_fresh() end
if newest_start > 0 and newest_start > tonumber(redis.call('HGET', FAIR, 'clock') or 0) then
  redis.call('HSET', FAIR, 'clock', string.format('%.0f', newest_start))
end
say_places()
if something_waits then wake_next() end
redis.call('HSET', PROGRESS, 'call', number, 'taken', table.concat(entries, ' '))
return answer
