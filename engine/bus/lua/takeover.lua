-- takeover: what dead engines of a slot had in flight waits again, as orphans, for the next engine of their fingerprint.
--
-- KEYS ledger, then owner, slot, its info, last incarnation
-- ARGV incarnation (this and those before it are dead), is it sure (1: its process was seen to end; 0: its heartbeat is missing),
--      does it blame (1: the requests may be why it died), entries to look at, where to start, consumer, error's number among the
--      reasons, prefix of client channels
-- Answer: how many requests were orphaned, how many ended, and where to go on ('': nowhere).
--
-- Only the ownership changes: outputs stay where they are, and the engine that takes an orphan reads them. The owner becomes a new
-- incarnation that no engine has, so that a dead engine that was only stopped is fenced. It refuses while the heartbeat is there
-- after all. A successor in the same slot keeps its own requests: records say which incarnation took them. Sent twice, or by several
-- observers at once: the second finds nothing pending.

local OWNER, SLOT, INFO, LAST = KEYS[OWN_KEYS + 1], KEYS[OWN_KEYS + 2], KEYS[OWN_KEYS + 3], KEYS[OWN_KEYS + 4]
local incarnation, sure, blames, count, start, consumer, reason, client_channel = unpack(ARGV)
local MOST_DEATHS_IN_A_ROW, MOST_DEATHS = 3, 8

local owner = redis.call('GET', OWNER)
if owner and tonumber(string.match(owner, '^%d+')) <= tonumber(incarnation) then
  if sure == '0' and redis.call('EXISTS', SLOT) == 1 then return {0, 0, ''} end
  redis.call('SET', OWNER, new_incarnation(LAST) .. ' vacant')
  redis.call('DEL', SLOT, INFO)
end
if redis.call('EXISTS', REQUESTS) == 0 then return {0, 0, ''} end

-- A request whose engines die again and again may be why. Progress between the deaths clears it (lua/checkpoint.lua).
local function is_suspected(id)
  local deaths = redis.call('HINCRBY', RECORD .. id, 'deaths', 1)
  return redis.call('HINCRBY', RECORD .. id, 'attempts', 1) >= MOST_DEATHS_IN_A_ROW or deaths >= MOST_DEATHS
end

local orphaned, ended = 0, 0
local function take_over(entry)
  local id = read_entry(entry) or find_by_entry(entry)
  local holder = id and redis.call('HGET', RECORD .. id, 'incarnation')
  if not holder then
    -- Nothing is known of it. While a successor lives, it may be that one's.
    if not owner or string.find(owner, 'vacant', 1, true) or tonumber(owner) <= tonumber(incarnation) then
      redis.call('XACK', REQUESTS, GROUP, entry)
      redis.call('XDEL', REQUESTS, entry)
    end
    return
  end
  if tonumber(holder) > tonumber(incarnation) then return end
  if blames == '1' and is_suspected(id) then
    local error = 'The engines that ran this request died, one after the other.'
    if end_in_error(id, client_channel, reason, error) then ended = ended + 1 end
    return
  end
  make_orphan(id, entry)
  orphaned = orphaned + 1
end

local pending = call_group('XPENDING', start, '+', count, consumer)
for _, item in ipairs(pending) do take_over(item[1]) end
if #pending < tonumber(count) then return {orphaned, ended, ''} end
return {orphaned, ended, '(' .. pending[#pending][1]}
