-- take: the requests that are next become the caller's.
--
-- KEYS 1-9 ledger, 10 slot, 11 what the slot took last
-- ARGV slot, incarnation, count, nonce, now, consumer
-- Answer: a list of entry and payload.
--
-- ZPOPMIN gives priorities, XCLAIM FORCE puts an entry that was never delivered on the caller's pending list, in any order. XREADGROUP >
-- must not be used beside it: it would deliver the same entries again.
-- Sent twice (the answer was lost): the nonce is that of the last take, whose entries are answered again.

local SLOT, TAKEN = KEYS[10], KEYS[11]
local TAKEN_TTL, LOST_RETENTION = 600000, 3600000 -- ms
local slot, incarnation, count, nonce, now, consumer = unpack(ARGV)

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

local answer, entries = {}, {}
local popped = redis.call('ZPOPMIN', ORDER, count)
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
