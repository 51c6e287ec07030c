-- loads: the live incarnations and the load of each.
--
-- KEYS[1] meta    hash   is there a namespace at all
-- KEYS[2] leases  zset   inc -> expiry, ms, Redis clock
-- KEYS[3] load    hash   inc -> load
-- Returns  {now_ms, {inc, ...}, {inc, load, ...}}   live leases; loads of routable incarnations
--          nil           there is no such namespace
-- Cost     O(workers). Reads only.
local meta, leases, load = KEYS[1], KEYS[2], KEYS[3]
-- @include clock
-- @include snapshot

if redis.call('EXISTS', meta) == 0 then
  return false
end
return snapshot(now_ms())
