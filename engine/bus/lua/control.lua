-- control: a command is put before an engine, which is woken.
--
-- KEYS control stream of its slot
-- ARGV incarnation, command, commands kept, control's time to live in ms, channel that wakes the engine
-- Answer: 1. Runs when memory is short too: it makes streams whole, or ends requests.

local incarnation, command, kept, ttl, channel = unpack(ARGV)
send_command(KEYS[1], channel, incarnation, command, kept, ttl)
return 1
