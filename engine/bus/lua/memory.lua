-- What Redis' memory leaves for new requests. It stands before the scripts that ask.

-- used memory and the limit beyond which nothing new is admitted, where that is passed. `share`: of maxmemory; 0: not checked.
local function memory_beyond(share)
  if tonumber(share) <= 0 then return nil end
  local info = redis.call('INFO', 'memory')
  local limit = tonumber(string.match(info, '\nmaxmemory:(%d+)')) * tonumber(share)
  local used = tonumber(string.match(info, 'used_memory:(%d+)'))
  if limit > 0 and used > limit then return used, limit end
  return nil
end
