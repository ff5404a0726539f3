-- fail_engine: the requests that a dead engine had in flight end with an error, and their API servers are told.
--
-- KEYS 1-9 ledger, 10 slot
-- ARGV incarnation (this and those before it are dead), error's number among the reasons, error text, entries to look at,
--      where to start, consumer, prefix of client channels
-- Answer: how many requests were ended, and where to go on ('': nowhere).
--
-- Refuses while one of the dead holds the slot after all. A replacement under the same consumer name keeps its own: records say which
-- incarnation took them. Sent twice, or by several observers at once: the second finds nothing pending.

local incarnation, reason, error, count, start, consumer, client_channel = unpack(ARGV)

local holder = redis.call('GET', KEYS[10])
if holder and tonumber(holder) <= tonumber(incarnation) then return {0, ''} end
if redis.call('EXISTS', REQUESTS) == 0 then return {0, ''} end

local function fail_entry(entry)
  local id = read_entry(entry) or find_by_entry(entry)
  local owner = id and redis.call('HGET', RECORD .. id, 'incarnation')
  if not owner then
    -- Nothing is known of it. While a replacement lives, it may be that one's.
    if not holder then
      redis.call('XACK', REQUESTS, GROUP, entry)
      redis.call('XDEL', REQUESTS, entry)
    end
    return 0
  end
  if tonumber(owner) > tonumber(incarnation) then return 0 end
  if not end_request(id, {'reason', 'error', 'error', error}) then return 0 end
  publish_ended(id, client_channel, reason, error)
  return 1
end

local pending = redis.call('XPENDING', REQUESTS, GROUP, start, '+', count, consumer)
local failed = 0
for _, item in ipairs(pending) do failed = failed + fail_entry(item[1]) end
if #pending < tonumber(count) then return {failed, ''} end
return {failed, '(' .. pending[#pending][1]}
