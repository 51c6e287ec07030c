-- now_ms(): the Redis clock, in ms; the only clock by which machines are compared.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
