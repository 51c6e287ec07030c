-- loads: the live incarnations and the load of each.
--
-- KEYS[1] meta    hash   version, workers_ms, shards, rounds
-- KEYS[2] leases  zset   inc -> expiry, ms, Redis clock
-- KEYS[3] load    hash   inc -> load
-- KEYS[4] flows   zset   flows that wait for a turn
-- KEYS[5] workers hash   inc -> info
-- KEYS[6] failures hash  inc -> what its failures have come to; worker -> whether it drains
-- KEYS[7] current hash   worker -> inc
-- KEYS[8] versions zset  inc -> version of its last change
-- ARGV[1] version int    of the data model that the caller speaks
-- ARGV[2] since   int    the caller knows what changed up to that version; 0: it knows nothing
-- Returns  {snapshot, workers_ms, shards, waiting, failing}
--                        snapshot: see lib/snapshot; anything else known of workers
--                        remains valid as long as workers_ms is the same; waiting is 1 if any
--                        request waits, else 0; failing, of each worker that failed requests: inc
--                        and what that came to, as lib/failures has it, or `draining` or
--                        `tainted`; workers that are either are there by their name, too, and as
--                        `away:<inc>` those whose agents are away
--          {version}     of the namespace's data model, which the caller does not speak
--          nil           there is no such namespace, or Redis has just lost it: workers that have
--                        registered again are not routable yet
-- Cost     O(workers), or of those that changed or lapsed. Reads only.
local meta, leases, load, flows, workers = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local failures, current, versions = KEYS[6], KEYS[7], KEYS[8]
-- @include clock
-- @include number
-- @include meta
-- @include snapshot
-- @include draining

local other = other_version(meta, workers, tonumber(ARGV[1]))
if other then
  return {other}
end
local _, shards, workers_ms = read_meta(meta)
if not shards then
  return false
end
local now = now_ms()
local found = snapshot(now, ARGV[2])
local is_everything = #found == 5
if is_everything and #found[3] > 0 and #found[4] == 0 then
  return false
end
local failing = redis.call('HGETALL', failures)
for inc, how in pairs(#failing > 0 and draining() or {}) do
  failing[#failing + 1], failing[#failing + 2] = inc, how
end
return {found, workers_ms, shards, redis.call('EXISTS', flows), failing}
