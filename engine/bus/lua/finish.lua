-- finish: a request ends, in whatever state it is.
--
-- KEYS ledger, then prefix of control streams
-- ARGV id, reason's number, reason's name, error, choice (-1: all), command, tombstone's time to live in ms, commands kept,
--      control's time to live in ms, prefix of client channels, prefix of control channels,
--      API server and handle of the stream that asks ('': not a stream)
-- Answer: the state before, and the record without its output, flat.
--
-- A stream that does not listen to the request any more changes nothing: the answer is "detached".
-- queued: ended here, its API server is told. running: the command goes to the owner, which answers. ended: nothing. unknown: a
-- tombstone, which `enqueue` meets. Sent twice: the second finds "ended", or puts a second command that finds nothing to do.
-- An engine may die before it obeys: the record keeps the command, for the engine that goes on. So it does for an orphan, whose
-- choice has stopped well: the next engine writes its whole output.

local CONTROL = KEYS[OWN_KEYS + 1]
local STOP = '0' -- protocol.FinishReason
local id, reason, reason_name, error, choice, command, tombstone_ttl, kept, control_ttl, client_channel, control_channel,
  client, handle = unpack(ARGV)
local key = RECORD .. id

local function record_without_output()
  local flat, answer = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do
    if flat[i] ~= 'output' and string.sub(flat[i], 1, 7) ~= 'finish:' then
      answer[#answer + 1] = flat[i]
      answer[#answer + 1] = flat[i + 1]
    end
  end
  return answer
end

local record = redis.call('HMGET', key, 'state', 'n', 'engine', 'incarnation', 'journals', 'client', 'handle')
local state, is_orphan = record[1], record[1] == 'queued' and record[5]

if not state or state == 'staged' then
  redis.call('SET', TOMBSTONE .. id, '', 'PX', tombstone_ttl)
  return {'unknown', {}}
end

if client ~= '' and (record[6] ~= client or record[7] ~= handle) then return {'detached', record_without_output()} end

if state == 'running' or is_orphan then redis.call('HSETNX', key, 'finish:' .. choice, command) end
if state == 'queued' and (choice == '-1' or record[2] == '1') and not (is_orphan and reason == STOP) then
  local facts = {'reason', reason_name}
  if error ~= '' then
    facts[3], facts[4] = 'error', error
  end
  end_request(id, facts)
  publish_ended(id, client_channel, reason, error)
elseif state == 'running' then
  send_command(CONTROL .. record[3], control_channel .. record[3], record[4], command, kept, control_ttl)
end
return {state, record_without_output()}
