-- name_model: the model stands among those that have had an engine. A script, because an engine beats even while Redis is out of memory.
--
-- KEYS models
-- ARGV model

redis.call('SADD', KEYS[1], ARGV[1])
