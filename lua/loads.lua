-- loads: the live incarnations and the load of each.
--
-- KEYS[1] meta    hash   created_ms, shards
-- KEYS[2] leases  zset   inc -> expiry, ms, Redis clock
-- KEYS[3] load    hash   inc -> load
-- Returns  {now_ms, {inc, ...}, {inc, load, ...}, created_ms, shards}   live leases; loads of routable
--                        incarnations; in a namespace made at another time, numbers begin again
--          nil           there is no such namespace
-- Cost     O(workers). Reads only.
local meta, leases, load = KEYS[1], KEYS[2], KEYS[3]
-- @include clock
-- @include snapshot

local created_ms, shards = unpack(redis.call('HMGET', meta, 'created_ms', 'shards'))
if not tonumber(created_ms) or not tonumber(shards) then
  return false
end
local found = snapshot(now_ms())
found[4], found[5] = created_ms, shards
return found
