-- Incarnations: Redis' clock in microseconds, and higher than all before, even where that clock was set back. It stands before the
-- scripts that give one.

local function new_incarnation(last_key)
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
  local last = tonumber(redis.call('GET', last_key) or 0)
  local text = string.format('%.0f', math.max(now, last + 1))
  redis.call('SET', last_key, text)
  return text
end
