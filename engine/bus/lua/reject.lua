-- reject: an engine gives up an entry that it cannot read or run; the request ends with an error.
--
-- KEYS ledger, then owner
-- ARGV incarnation, entry, error's number among the reasons, error text, prefix of client channels
-- Answer: 1, or 0 where the entry is not this incarnation's any more. Sent twice: the second finds it ended.

local incarnation, entry, reason, error, client_channel = unpack(ARGV)

local refused = not_owner(KEYS[OWN_KEYS + 1], incarnation)
if refused then return refused end
local id = read_entry(entry)
if not id or redis.call('HGET', RECORD .. id, 'incarnation') ~= incarnation then return 0 end
return end_in_error(id, client_channel, reason, error) and 1 or 0
