-- detach: no stream listens to a request any more.
--
-- KEYS ledger
-- ARGV id, API server, handle ('': any of this server's)
-- Answer: milliseconds of its grace time that are left, or -1 where another stream listens, or the request has ended.
--
-- The grace time counts from the first of these calls. An API server makes one when a client disconnects, maintenance when an API
-- server is dead.

local id, client, handle = unpack(ARGV)
local key = RECORD .. id
local record = redis.call('HMGET', key, 'state', 'client', 'handle', 'grace', 'detached')
if not record[1] or record[1] == 'ended' then return -1 end
if record[2] ~= client or (handle ~= '' and record[3] ~= handle) then return -1 end
local grace = tonumber(record[4] or 0)
if grace <= 0 then return 0 end
if not record[5] then redis.call('HSET', key, 'detached', NOW) end
local gone = (tonumber(NOW) - tonumber(record[5] or NOW)) * 1000
return math.max(0, math.ceil(grace - gone))
