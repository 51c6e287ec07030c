-- lead: makes a planner the one that acts in a namespace, or keeps it so, until its lease ends.
--
-- A leader's token is the time at which it began to lead, so no two have the same one even if Redis has
-- lost all in between. Tokens and ends that no planner would write do not count.
--
-- KEYS[1] planner   hash  holder, token, until_ms, state, desired, size, reason, victim, values
-- ARGV[1] holder    str   who asks
-- ARGV[2] ttl_ms    n     how long from now; 0: leave, so that another may lead at once
-- Returns  {token, state}   it leads; the token grows with each new leader, and is past 0
--          {0, holder}      somebody else does
-- Cost     O(1). Writes. Safe to retry.
local planner = KEYS[1]
local holder, ttl_ms = ARGV[1], tonumber(ARGV[2])
-- @include clock
-- @include number
-- @include despite_full

local LONGEST_MS, MOST = 3600 * 1000, 2 ^ 52
local now = now_ms()
local held = redis.call('HMGET', planner, 'holder', 'token', 'until_ms', 'state')
local token = whole(held[2], MOST) or 0
if held[1] and held[1] ~= holder and (whole(held[3], now + LONGEST_MS) or 0) > now then
  return { 0, held[1] }
end
if held[1] ~= holder or token == 0 then
  token = math.max(now, token + 1)
end
despite_full(planner)
redis.call('HSET', planner, 'holder', holder, 'token', string.format('%d', token),
  'until_ms', string.format('%d', now + ttl_ms))
return { token, held[4] or '' }
