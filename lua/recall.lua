-- recall: where sessions last went.
--
-- KEYS[1] sessions  hash   session -> "<inc> <when, ms>"
-- ARGV[1] ttl_ms    int    > 0; what is older is forgotten
-- ARGV[2...] session str   at most 4,000 of them
-- Returns  {inc, ...}      one per session, '' if none is known
-- Cost     O(sessions). Reads only.
local sessions, ttl_ms = KEYS[1], tonumber(ARGV[1])
-- @include clock
-- @include number

local oldest = now_ms() - ttl_ms
local found = redis.call('HMGET', sessions, unpack(ARGV, 2))
for i, text in ipairs(found) do
  local inc, at_ms = string.match(text or '', '^(%d+) (%d+)$')
  found[i] = whole(inc, 1e15) and tonumber(at_ms) > oldest and inc or ''
end
return found
