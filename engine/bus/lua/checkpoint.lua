-- checkpoint: outputs of running requests move from their engine's journal to lists of their own.
--
-- KEYS ledger, then owner, journal
-- ARGV incarnation, slot, flush number up to which the journal is not needed any more (0: it stays), number of requests; of each:
--      id, remark (adopt: it was taken over, and this is all its earlier output; well: it made so much output that it is no reason of
--      deaths; else ''), output
-- Answer: how many of the requests run here.
--
-- Outputs bear their offsets, so that one which stands in the list twice, or in the journal too, is one output. Of a request that was
-- taken over, the first checkpoint has all earlier output: from then on no other journal is named by its record.

local OWNER, JOURNAL = KEYS[OWN_KEYS + 1], KEYS[OWN_KEYS + 2]
local incarnation, slot, flushed, count = unpack(ARGV)

local refused = not_owner(OWNER, incarnation)
if refused then return refused end

local at, appended = 5, 0
for _ = 1, tonumber(count) do
  local id, remark, output = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  at = at + 3
  local record = redis.call('HMGET', RECORD .. id, 'state', 'incarnation')
  if record[1] == 'running' and record[2] == incarnation then
    redis.call('RPUSH', OUTPUT .. id, output)
    if remark == 'adopt' then
      redis.call('HSET', RECORD .. id, 'journals', slot .. ':' .. incarnation)
    elseif remark == 'well' then
      redis.call('HDEL', RECORD .. id, 'attempts')
    end
    appended = appended + 1
  end
end
if tonumber(flushed) > 0 then
  redis.call('XTRIM', JOURNAL, 'MINID', string.format('%d-0', tonumber(flushed) + 1))
end
return appended
