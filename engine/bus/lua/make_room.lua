-- make_room: outputs of ended requests give way, oldest first, until Redis has memory for new requests.
--
-- KEYS ledger
-- ARGV share of maxmemory beyond which nothing new is admitted, most outputs to drop
-- Answer: how many were dropped.

local share, most = ARGV[1], tonumber(ARGV[2])

local dropped = 0
while dropped < most and memory_beyond(share) and drop_oldest_output() do dropped = dropped + 1 end
return dropped
