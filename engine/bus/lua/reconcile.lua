-- reconcile: what an engine holds and what Redis says it has in flight become the same, after a restart of Redis or a lost connection.
--
-- KEYS ledger, then owner
-- ARGV incarnation, slot, fingerprint, consumer, ids of the requests held
-- Answer: ids that Redis does not know, ids that the engine must drop, and how many requests it had in flight and does not hold.
--
-- Held but queued in Redis (the take was rolled back): claimed. Held but ended, or another engine's: to be dropped. Pending but not
-- held: queued again.

local OWNER = KEYS[OWN_KEYS + 1]
local incarnation, slot, fingerprint, consumer = unpack(ARGV)

local refused = not_owner(OWNER, incarnation)
if refused then return refused end

local held, unknown, foreign = {}, {}, {}

local function claim_back(id, record)
  local entry = record[3]
  if record[1] == 'queued' then
    leave_queue(id, entry, record[4], tonumber(record[5]), tonumber(record[6]), record[7])
  end
  if give_to(id, entry, slot, incarnation, fingerprint, consumer) then
    held[entry] = true
  else -- the entry is gone: it is made anew with the record
    local named = redis.call('HMGET', RECORD .. id, 'client', 'external_id', 'retention')
    add_request(record[4], named[1], tonumber(record[5]), -1)
    if record[1] == 'running' then add_height(slot, -tonumber(record[5])) end
    expire_external(named[2], named[3] or OLD_RETENTION)
    redis.call('DEL', RECORD .. id)
    redis.call('ZREM', LIVE, id)
    unknown[#unknown + 1] = id
  end
end

for i = 5, #ARGV do
  local id = ARGV[i]
  local record = redis.call('HMGET', RECORD .. id, 'state', 'incarnation', 'entry', 'tenant', 'n', 'prompt_tokens', 'fingerprint')
  if not record[1] then
    unknown[#unknown + 1] = id
  elseif record[1] == 'queued' then
    claim_back(id, record)
  elseif record[1] == 'running' and record[2] == incarnation then
    local entry = record[3]
    held[entry] = true
    if #call_group('XPENDING', entry, entry, 1, consumer) == 0 then claim_back(id, record) end
  else
    foreign[#foreign + 1] = id
  end
end

local returned = 0
if redis.call('EXISTS', REQUESTS) == 1 then
  for _, item in ipairs(call_group('XPENDING', '-', '+', 100000, consumer)) do
    local entry = item[1]
    local id = not held[entry] and read_entry(entry)
    if id and redis.call('HGET', RECORD .. id, 'incarnation') == incarnation then
      make_orphan(id, entry)
      returned = returned + 1
    end
  end
end
return {unknown, foreign, returned}
