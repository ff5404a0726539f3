-- control: a command is put before an engine, which is woken.
--
-- KEYS control stream of its slot
-- ARGV incarnation, command, commands kept, control's time to live in ms, channel that wakes the engine
-- Answer: 1. Runs when memory is short too: it makes streams whole, or ends requests.

redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[3], '*', 'incarnation', ARGV[1], 'command', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('PUBLISH', ARGV[5], '')
return 1
