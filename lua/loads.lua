-- loads: the live incarnations and the load of each.
--
-- KEYS[1] meta    hash   workers_ms, shards
-- KEYS[2] leases  zset   inc -> expiry, ms, Redis clock
-- KEYS[3] load    hash   inc -> load
-- KEYS[4] flows   zset   who waits for a turn
-- Returns  {now_ms, {inc, ...}, {inc, load, ...}, workers_ms, shards, waiting}   live leases; loads
--                        of routable incarnations; whatever else was known of workers holds for as
--                        long as workers_ms stays the same; waiting is 1 if anybody does, else 0
--          nil           there is no such namespace, or Redis has just lost it: those who have
--                        registered again are still on their way
-- Cost     O(workers). Reads only.
local meta, leases, load, flows = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
-- @include clock
-- @include number
-- @include meta
-- @include snapshot

local _, shards, workers_ms = read_meta(meta)
if not shards then
  return false
end
local found = snapshot(now_ms())
if #found[2] > 0 and #found[3] == 0 then
  return false
end
found[4], found[5], found[6] = workers_ms, shards, redis.call('EXISTS', flows)
return found
