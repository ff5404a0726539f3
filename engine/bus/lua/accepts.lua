-- accepts: would Redis take a new request now? Nothing is written.
--
-- ARGV share of maxmemory beyond which nothing new is admitted
-- Answer: nothing, or used memory and limit. As a script that may write and is not allowed to run without memory, it meets whatever
-- error keeps `enqueue` from running: no memory, a full disk, a read-only replica, missing replicas.

local used, limit = memory_beyond(ARGV[1])
if used then return {string.format('%d', used), string.format('%d', limit)} end
return {}
