-- beat_api: an API server's heartbeat.
--
-- KEYS its key, index of API servers
-- ARGV time to live in ms, incarnation
-- Answer: 1. Runs when memory is short too: the requests of a server that falls silent are ended.

redis.call('SET', KEYS[1], '', 'PX', ARGV[1])
redis.call('ZADD', KEYS[2], redis.call('TIME')[1], ARGV[2])
return 1
