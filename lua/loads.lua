-- loads: returns the live incarnations and the load of each.
--
-- KEYS[1] meta    hash   version, workers_ms, shards, rounds, mixed_ms
-- KEYS[2] leases  zset   inc -> expiry, ms, Redis clock
-- KEYS[3] load    hash   inc -> load
-- KEYS[4] flows   zset   flows that wait for a turn
-- KEYS[5] workers hash   inc -> info
-- KEYS[6] verdicts hash  worker -> its marks; see lib/verdict
-- KEYS[7] current hash   worker -> inc
-- KEYS[8] versions zset  inc -> version of its last change
-- KEYS[9] fetches zset   attempt -> until when, ms; see lib/fetches
-- KEYS[10] fetching hash attempt -> what it fetches
-- ARGV[1] version int    of the data model that the caller speaks
-- ARGV[2] since   int    the caller knows what changed up to that version; 0: it knows nothing
-- ARGV[3] ahead_ms int   of fetches, also those that may begin late in so many milliseconds
-- Returns  {snapshot, workers_ms, shards, waiting, marked, late, fetched, mixed_ms}
--                        snapshot: see lib/snapshot; anything else known of workers
--                        remains valid as long as workers_ms is the same; waiting is 1 if any
--                        request waits, else 0; mixed_ms, when a reservation was of
--                        another flow than the one before it, 0: never; marked, of each worker that has marks: inc and
--                        those, JSON; late and fetched: see lib/fetches
--          {version}     of the namespace's data model, which the caller does not speak
--          nil           there is no such namespace, or Redis has just lost it: workers that have
--                        registered again are not routable yet
-- Cost     O(workers), or of those that changed or lapsed. Reads only.
local meta, leases, load, flows, workers = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local verdicts, current, versions = KEYS[6], KEYS[7], KEYS[8]
local fetches, fetching = KEYS[9], KEYS[10]
-- @include clock
-- @include number
-- @include meta
-- @include snapshot
-- @include fetches

local other = other_version(meta, workers, tonumber(ARGV[1]))
if other then
  return {other}
end
local _, shards, workers_ms, mixed_ms = read_meta(meta)
if not shards then
  return false
end
local now = now_ms()
local found = snapshot(now, ARGV[2])
local is_everything = #found == 5
if is_everything and #found[3] > 0 and #found[4] == 0 then
  return false
end
local marked, all = {}, redis.call('HGETALL', verdicts)
for i = 1, #all, 2 do
  local inc = redis.call('HGET', current, all[i])
  if inc then
    marked[#marked + 1], marked[#marked + 2] = inc, all[i + 1]
  end
end
local late, fetched = late_fetches(now + tonumber(ARGV[3]))
return {found, workers_ms, shards, redis.call('EXISTS', flows), marked, late, fetched, mixed_ms}
