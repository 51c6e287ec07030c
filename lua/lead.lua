-- lead: become, or remain, the one planner of a namespace that acts, until the lease ends.
--
-- KEYS[1] planner   hash  holder, token, until_ms, state, desired, size, reason, victim, values
-- ARGV[1] holder    str   who asks
-- ARGV[2] ttl_ms    n     how long from now; 0: leave, so that another may lead at once
-- Returns  {token, state}   it leads; the token grows with each new leader
--          {0, holder}      somebody else does
-- Cost     O(1). Writes. Safe to retry.
local planner = KEYS[1]
local holder, ttl_ms = ARGV[1], tonumber(ARGV[2])
-- @include clock

local now = now_ms()
local held = redis.call('HMGET', planner, 'holder', 'token', 'until_ms', 'state')
local token = tonumber(held[2]) or 0
if held[1] ~= holder then
  if held[1] and (tonumber(held[3]) or 0) > now then
    return { 0, held[1] }
  end
  token = token + 1
end
redis.call('HSET', planner, 'holder', holder, 'token', token,
  'until_ms', string.format('%d', now + ttl_ms))
return { token, held[4] or '' }
