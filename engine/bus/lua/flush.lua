-- flush: a step's outputs, at once: the journal's entry, the publications, the records of requests that started or ended.
--
-- KEYS 1-9 ledger, 10 slot, 11 journal
-- ARGV incarnation, flush number, entries kept, journal's time to live in ms, prefix of client channels, and
--      the numbers of messages, started, ended, notices; then
--      messages: API server, payload; started: id, number of field names and values, these; ended: likewise; notices: channel, payload
-- Answer: 1, or 0 for a flush that was done before.
--
-- Sent twice: the journal's ids are the flush numbers, and a stream refuses an id that is not higher than its last. The journal
-- comes before the publications, so that an output that a receiver missed is in it. Outputs of a request cost nothing of their own:
-- the columns are one message a server.

local SLOT, JOURNAL = KEYS[10], KEYS[11]
local incarnation, flush_number, kept, ttl, client_channel = unpack(ARGV, 1, 5)
local num_messages, num_started, num_ended, num_notices = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])

if fenced(SLOT, incarnation) then return redis.error_reply(FENCED) end

local at = 10
local messages_end = at + 2 * num_messages
local journaled
if num_messages > 0 then
  journaled = redis.pcall('XADD', JOURNAL, 'MAXLEN', '~', kept, flush_number .. '-0', unpack(ARGV, at, messages_end - 1))
else
  journaled = redis.pcall('XADD', JOURNAL, 'MAXLEN', '~', kept, flush_number .. '-0', '', '')
end
if type(journaled) == 'table' then
  if string.find(journaled.err, 'equal or smaller', 1, true) then return 0 end
  return journaled
end
redis.call('PEXPIRE', JOURNAL, ttl)

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
  if ours(id) then end_request(id, fields) end
end

for _ = 1, num_notices do
  redis.call('PUBLISH', ARGV[at], ARGV[at + 1])
  at = at + 2
end
return 1
