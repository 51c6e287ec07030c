-- lapse: retire incarnations whose lease lapsed some time ago.
--
-- KEYS[1] workers       hash   inc -> info
-- KEYS[2] current       hash   worker -> inc
-- KEYS[3] leases        zset   inc -> expiry, ms
-- KEYS[4] writers       hash   inc -> nonce
-- KEYS[5] load          hash   inc -> load
-- KEYS[6] reservations  hash   request_id -> inc
-- KEYS[7] expiry        zset   request_id -> expiry, ms
-- KEYS[8] requests:     hashes inc -> its requests
-- KEYS[9] prefills:     lists  inc -> its requests still prefilling
-- ARGV[1] grace_ms      int    a lease that lapsed less long ago may still be renewed: nobody is
--                              routed there meanwhile, but its requests and blocks are kept
-- Returns  how many were retired, at most 16
-- Cost     O(16 * (log workers + requests of a worker)). Writes. Safe to retry.
local workers, current, leases, writers, load = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local reservations, expiry, requests_prefix, prefills_prefix = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local grace_ms = tonumber(ARGV[1])
-- @include clock
-- @include retire

local too_late = string.format('%d', now_ms() - grace_ms)
local lapsed = redis.call('ZRANGEBYSCORE', leases, '-inf', too_late, 'LIMIT', 0, 16)
for _, inc in ipairs(lapsed) do
  local readable, info = pcall(cjson.decode, redis.call('HGET', workers, inc) or '')
  local worker = readable and info.worker
  retire(inc)
  if worker and redis.call('HGET', current, worker) == inc then
    redis.call('HDEL', current, worker)
  end
end
return #lapsed
