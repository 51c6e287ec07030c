-- remember: records that a session went to a worker.
--
-- KEYS[1] sessions  hash   session -> "<inc> <when, ms>"
-- ARGV[1] session   str
-- ARGV[2] inc       int    the worker's
-- ARGV[3] ttl_ms    int    > 0; after that it is forgotten, and all are if none comes meanwhile
-- ARGV[4] limit     int    > 0; with this many others, the oldest of a few gives way
-- Returns  how many were forgotten
-- Cost     O(1). Writes. Safe to retry.
local sessions, session, inc = KEYS[1], ARGV[1], ARGV[2]
local ttl_ms, limit = tonumber(ARGV[3]), tonumber(ARGV[4])
-- @include clock

local now = now_ms()
local forgotten = 0
local function forget(other)
  forgotten = forgotten + redis.call('HDEL', sessions, other)
end

local picked = redis.call('HRANDFIELD', sessions, 8, 'WITHVALUES')
local oldest, oldest_ms = nil, math.huge
for i = 1, #picked, 2 do
  -- What cannot be read counts as oldest; no session went anywhere later than now.
  local at_ms = tonumber(string.match(picked[i + 1], '^%d+ (%d+)$') or 0)
  if at_ms <= now - ttl_ms or at_ms > now then
    forget(picked[i])
  elseif at_ms < oldest_ms and picked[i] ~= session then
    oldest, oldest_ms = picked[i], at_ms
  end
end
redis.call('HSET', sessions, session, string.format('%d %d', inc, now))
if oldest and redis.call('HLEN', sessions) > limit then
  forget(oldest)
end
redis.call('PEXPIRE', sessions, ttl_ms)
return forgotten
