-- finish: a request ends, in whatever state it is.
--
-- KEYS 1-9 ledger, 10 prefix of control streams
-- ARGV id, reason's number, reason's name, error, choice (-1: all), command, tombstone's time to live in ms, commands kept,
--      control's time to live in ms, prefix of client channels, prefix of control channels
-- Answer: the state before, and the record without its output, flat.
--
-- queued: ended here, its API server is told. running: the command goes to the owner, which answers. ended: nothing. unknown: a
-- tombstone, which `enqueue` meets. Sent twice: the second finds "ended", or puts a second command that finds nothing to do.

local CONTROL = KEYS[10]
local id, reason, reason_name, error, choice, command, tombstone_ttl, kept, control_ttl, client_channel, control_channel = unpack(ARGV)
local key = RECORD .. id

local function record_without_output()
  local flat, answer = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do
    if flat[i] ~= 'output' then
      answer[#answer + 1] = flat[i]
      answer[#answer + 1] = flat[i + 1]
    end
  end
  return answer
end

local record = redis.call('HMGET', key, 'state', 'n', 'engine', 'incarnation')
local state = record[1]

if not state then
  redis.call('SET', TOMBSTONE .. id, '', 'PX', tombstone_ttl)
  return {'unknown', {}}
end

if state == 'queued' and (choice == '-1' or record[2] == '1') then
  local facts = {'reason', reason_name}
  if error ~= '' then
    facts[3], facts[4] = 'error', error
  end
  end_request(id, facts)
  publish_ended(id, client_channel, reason, error)
elseif state == 'running' then
  local stream = CONTROL .. record[3]
  redis.call('XADD', stream, 'MAXLEN', '~', kept, '*', 'incarnation', record[4], 'command', command)
  redis.call('PEXPIRE', stream, control_ttl)
  redis.call('PUBLISH', control_channel .. record[3], '')
end
return {state, record_without_output()}
