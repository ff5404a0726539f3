-- beat: the slot's heartbeat, with what the engine says of itself.
--
-- KEYS slot, its info
-- ARGV incarnation, time to live in ms, info
-- Answer: Redis' clock, by which the engine sets its own, as TIME gives it; or the error FENCED. A slot that ran out is not revived:
-- others may have declared its engine dead.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return redis.error_reply('FENCED the slot is not held by this incarnation')
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[2])
return redis.call('TIME')
