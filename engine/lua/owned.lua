-- owned: what the pending list says that an engine has in flight. Reads only.
--
-- KEYS 1-9 ledger, 10 slot
-- ARGV slot, incarnation, consumer
-- Answer: a list of entry and payload.

local slot, incarnation, consumer = unpack(ARGV)

if fenced(KEYS[10], incarnation) then return redis.error_reply(FENCED) end
if redis.call('EXISTS', REQUESTS) == 0 then return {} end
local answer = {}
for _, pending in ipairs(redis.call('XPENDING', REQUESTS, GROUP, '-', '+', 65536, consumer)) do
  local id, payload = read_entry(pending[1])
  if id and redis.call('HGET', RECORD .. id, 'incarnation') == incarnation then
    answer[#answer + 1] = {pending[1], payload}
  end
end
return answer
