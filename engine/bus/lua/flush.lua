-- flush: a step's outputs, at once: the journal's entry, the publications, the records of requests that started or ended.
--
-- KEYS ledger, then owner, progress of the slot, journal
-- ARGV incarnation, number of the flush before, flush number, journal's time to live in ms, prefix of client channels, budget of bytes
--      for kept outputs, and
--      the numbers of messages, started, ended, notices; then
--      messages: API server, payload; started: id, number of field names and values, these; ended: likewise; notices: channel, payload
-- Answer: 1, 0 for a flush that was done before, or -1 where flushes before this one are missing; and the number of the last one.
--
-- The progress of a slot has the last flush number. By it a flush that is sent twice counts once, and the engine hears of flushes that
-- Redis lost in a restart. The journal comes before the publications, so that an output that a receiver missed is in it. A request
-- costs nothing of its own: its outputs are rows of one message for each API server.

local OWNER, PROGRESS, JOURNAL = KEYS[OWN_KEYS + 1], KEYS[OWN_KEYS + 2], KEYS[OWN_KEYS + 3]
local incarnation, previous, flush_number, ttl, client_channel, budget = unpack(ARGV, 1, 6)
local num_messages, num_started, num_ended, num_notices = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])

local EXPIRY_FLUSHES = 256 -- after which the journal's time to live begins anew

local refused = not_owner(OWNER, incarnation)
if refused then return refused end

-- The number of the last flush. Where the progress is gone, the journal knows the last one that had messages.
local function last_flush()
  local number = redis.call('HGET', PROGRESS, 'flushed')
  if number or redis.call('EXISTS', JOURNAL) == 0 then return tonumber(number or 0) end
  return tonumber(string.match(field_of(redis.call('XINFO', 'STREAM', JOURNAL), 'last-generated-id'), '^%d+'))
end

local last = last_flush()
if last >= tonumber(flush_number) then return {0, last} end
if last ~= tonumber(previous) then return {-1, last} end
redis.call('HSET', PROGRESS, 'flushed', flush_number)

local at = 11
local messages_end = at + 2 * num_messages
if num_messages > 0 then
  redis.call('XADD', JOURNAL, flush_number .. '-0', unpack(ARGV, at, messages_end - 1))
  if tonumber(flush_number) % EXPIRY_FLUSHES == 1 then redis.call('PEXPIRE', JOURNAL, ttl) end
end

while at < messages_end do
  redis.call('PUBLISH', client_channel .. ARGV[at], ARGV[at + 1])
  at = at + 2
end

-- Only what runs here may be changed from here.
local function ours(id)
  local record = redis.call('HMGET', RECORD .. id, 'state', 'incarnation')
  return record[1] == 'running' and record[2] == incarnation
end

local function next_fields()
  local id, length = ARGV[at], tonumber(ARGV[at + 1])
  local fields = {unpack(ARGV, at + 2, at + 1 + length)}
  at = at + 2 + length
  return id, fields
end

for _ = 1, num_started do
  local id, fields = next_fields()
  if #fields > 0 and ours(id) then redis.call('HSET', RECORD .. id, unpack(fields)) end
end

for _ = 1, num_ended do
  local id, fields = next_fields()
  if ours(id) and end_request(id, fields) then keep_output(id, tonumber(budget)) end
end

for _ = 1, num_notices do
  redis.call('PUBLISH', ARGV[at], ARGV[at + 1])
  at = at + 2
end
return {1, tonumber(flush_number)}
