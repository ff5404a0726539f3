-- How a command gets to an engine. It stands before the scripts that give commands.

-- Put behind the other commands in the control stream of a slot, whose engine is woken. `kept`: commands; `ttl`: of the stream, in ms.
local function send_command(stream, channel, incarnation, command, kept, ttl)
  redis.call('XADD', stream, 'MAXLEN', '~', kept, '*', 'incarnation', incarnation, 'command', command)
  redis.call('PEXPIRE', stream, ttl)
  redis.call('PUBLISH', channel, '')
end
