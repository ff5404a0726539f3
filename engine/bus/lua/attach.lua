-- attach: other streams get the output of some requests from now on.
--
-- KEYS ledger, then prefix of control streams
-- ARGV API server, commands kept, control's time to live in ms, prefix of client channels, prefix of control channels,
--      number of requests; of each: id, handle, command
-- Answer: a state each, or unknown.
--
-- The record lists all attachments, oldest first: the output that journals have of a request bears the handles of its time. The
-- API server that listened before is told. A running request's engine gets the command; an engine that takes the request later
-- reads the record. Nothing changes for one that has ended. Sent twice: an attachment that is the present one is not made again,
-- and the engine obeys the same command again.

local CONTROL = KEYS[OWN_KEYS + 1]
local client, kept, control_ttl, client_channel, control_channel, count = unpack(ARGV, 1, 6)

local function tell_before(id, before, handle)
  redis.call('PUBLISH', client_channel .. before, cmsgpack.pack({4, id, tonumber(handle)})) -- protocol.Detached
end

local function change_record(id, record, handle)
  local before = record[3] or ''
  local earlier = record[5] or before .. ':' .. record[4]
  redis.call('HSET', RECORD .. id, 'client', client, 'handle', handle, 'attachments', earlier .. ' ' .. client .. ':' .. handle)
  redis.call('HDEL', RECORD .. id, 'detached')
  add_sum('client:' .. before, -1)
  add_sum('client:' .. client, 1)
  if before ~= '' then tell_before(id, before, record[4]) end
end

local function attach(id, handle, command)
  local record = redis.call('HMGET', RECORD .. id, 'state', 'engine', 'client', 'handle', 'attachments', 'incarnation')
  local state = record[1]
  if not state then return 'unknown' end
  if state == 'ended' then return state end
  if record[3] ~= client or record[4] ~= handle then change_record(id, record, handle) end
  if state == 'running' then
    send_command(CONTROL .. record[2], control_channel .. record[2], record[6], command, kept, control_ttl)
  end
  return state
end

local states = {}
for i = 1, tonumber(count) do
  states[i] = attach(unpack(ARGV, 3 * i + 4, 3 * i + 6))
end
return states
