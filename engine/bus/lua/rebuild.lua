-- rebuild: requests that an engine holds and Redis has forgotten stand in Redis again, as that engine's.
--
-- KEYS ledger, then owner
-- ARGV incarnation, slot, fingerprint, consumer, number of requests; of each: id, payload, number of field names and values, these
-- Answer: ids of the requests that were aborted meanwhile. One that Redis knows after all stays as it is: its API server enqueued it
-- again, perhaps, and `reconcile` says whose it is.

local OWNER = KEYS[OWN_KEYS + 1]
local incarnation, slot, fingerprint, consumer, count = unpack(ARGV)

local refused = not_owner(OWNER, incarnation)
if refused then return refused end

local aborted, at = {}, 6
for i = 1, tonumber(count) do
  local id, payload, length = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  local fields = {unpack(ARGV, at + 3, at + 2 + length)}
  at = at + 3 + length
  if redis.call('EXISTS', TOMBSTONE .. id) == 1 then
    aborted[#aborted + 1] = id
  elseif redis.call('EXISTS', RECORD .. id) == 0 then
    local entry = add_entry(id, payload, fields)
    add_request(field_of(fields, 'tenant'), field_of(fields, 'client'), tonumber(field_of(fields, 'n')), 1)
    give_to(id, entry, slot, incarnation, fingerprint, consumer)
  end
end
return aborted
