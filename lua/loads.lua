-- loads: the live incarnations and the load of each.
--
-- KEYS[1] meta    hash   version, workers_ms, shards, rounds
-- KEYS[2] leases  zset   inc -> expiry, ms, Redis clock
-- KEYS[3] load    hash   inc -> load
-- KEYS[4] flows   zset   flows that wait for a turn
-- KEYS[5] workers hash   inc -> info
-- KEYS[6] failures hash  inc -> count and time of the last; worker -> whether it drains
-- KEYS[7] current hash   worker -> inc
-- ARGV[1] version int    of the data model that the caller speaks
-- Returns  {now_ms, {inc, ...}, {inc, load, ...}, rounds, workers_ms, shards, waiting, failing}
--                        live leases; loads of routable incarnations; rounds of reservations so
--                        far, in millionths; anything else known of workers
--                        remains valid as long as workers_ms is the same; waiting is 1 if any
--                        request waits, else 0; failing, of each worker that failed requests: inc,
--                        how many, and until when it is paused, ms; -1: it drains
--          {version}     of the namespace's data model, which the caller does not speak
--          nil           there is no such namespace, or Redis has just lost it: workers that have
--                        registered again are not routable yet
-- Cost     O(workers). Reads only.
local meta, leases, load, flows, workers = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local failures, current = KEYS[6], KEYS[7]
-- @include clock
-- @include number
-- @include meta
-- @include snapshot
-- @include failures
-- @include pause
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
local found = snapshot(now)
if #found[2] > 0 and #found[3] == 0 then
  return false
end
found[5], found[6], found[7] = workers_ms, shards, redis.call('EXISTS', flows)
local failing = {}
local function add(inc, count, until_ms)
  failing[#failing + 1], failing[#failing + 2], failing[#failing + 3] = inc, count, until_ms
end
local names = redis.call('HKEYS', failures)
local drains = #names > 0 and draining() or {}
for _, name in ipairs(names) do
  local count, last_ms = failures_of(name, now)
  if count > 0 and not drains[name] then
    add(name, count, pause_ends_ms(count, last_ms))
  end
end
for inc in pairs(drains) do
  local count = failures_of(inc, now)
  add(inc, count, -1)
end
found[8] = failing
return found
