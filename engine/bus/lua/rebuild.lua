-- rebuild: requests that an engine holds and Redis has forgotten stand in Redis again, as that engine's.
--
-- KEYS ledger, then owner
-- ARGV incarnation, slot, fingerprint, consumer, number of requests; of each: id, payload, number of field names and values, these
-- Answer: the entries, in the order of the requests; '' for a request that Redis knows after all, or that was aborted meanwhile.

local OWNER = KEYS[OWN_KEYS + 1]
local incarnation, slot, fingerprint, consumer, count = unpack(ARGV)

local refused = not_owner(OWNER, incarnation)
if refused then return refused end

local entries, at = {}, 6
for i = 1, tonumber(count) do
  local id, payload, length = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  local fields = {unpack(ARGV, at + 3, at + 2 + length)}
  at = at + 3 + length
  entries[i] = ''
  if redis.call('EXISTS', RECORD .. id, TOMBSTONE .. id) == 0 then
    entries[i] = add_entry(id, payload, fields)
    add_request(field_of(fields, 'tenant'), field_of(fields, 'client'), tonumber(field_of(fields, 'n')), 1)
    give_to(id, entries[i], slot, incarnation, fingerprint, consumer)
  end
end
return entries
