-- renew: extend an incarnation's lease. A lapsed incarnation is revived, unless it has been
-- retired since: its worker is alive, and has only missed a renewal. If it has failed requests, its
-- lease stays lapsed, though not for so long that it is retired, until its pause ends or no other
-- worker is left.
--
-- What Redis has lost of the worker since, or of the namespace, comes back with the heartbeat.
--
-- KEYS[1] meta          hash   version, block_size, shards, incarnations, workers_ms
-- KEYS[2] workers       hash   inc -> info
-- KEYS[3] current       hash   worker -> inc
-- KEYS[4] leases        zset   inc -> expiry, ms, Redis clock
-- KEYS[5] writers       hash   inc -> nonce
-- KEYS[6] load          hash   inc -> load
-- KEYS[7] reservations  hash   request_id -> inc
-- KEYS[8] expiry        zset   request_id -> expiry, ms
-- KEYS[9] requests:     hashes inc -> its requests
-- KEYS[10] prefills:    lists  inc -> its requests still prefilling
-- KEYS[11] failures     hash   inc -> count and time of the last; worker -> whether it drains
-- KEYS[12] versions      zset   inc -> version of its last change
-- ARGV[1] worker        str    "<worker_id>:<dp_rank>"
-- ARGV[2] inc           int
-- ARGV[3] nonce         str    as registered
-- ARGV[4] ttl_ms        int    > 0
-- ARGV[5] info          JSON   WorkerInfo and lease_ttl_ms
-- ARGV[6] block_size    int    tokens
-- ARGV[7] shards        int    that `inc` publishes in
-- ARGV[8] staged        0|1    1: the worker is not switched over to `inc` yet
-- ARGV[9] thorough      0|1    1: recount the load even if it can be read
-- ARGV[10] version      int    of the data model that the worker speaks
-- ARGV[11] drains       0|1    1: as far as its agent knows, the worker is out of service
-- Returns  {n, drains}         renewed; how many incarnations have a lease, at least 1; whether the
--                              worker is out of service
--          {0}                 retired, unknown or replaced, or the index has other shards, or
--                              the namespace another version: the worker must register again
-- Cost     O(log workers); a count O(requests of the worker), 4 us each. Writes. Safe to retry.
local meta, workers, current, leases, writers = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local load, reservations, expiry, requests_prefix = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local prefills_prefix, failures, versions = KEYS[10], KEYS[11], KEYS[12]
local worker, inc, nonce, ttl_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local info, block_size, shards = ARGV[5], ARGV[6], ARGV[7]
local staged, thorough, version = ARGV[8] == '1', ARGV[9] == '1', ARGV[10]
-- @include clock
-- @include number
-- @include meta
-- @include writer
-- @include serving
-- @include load
-- @include changed
-- @include record
-- @include recount
-- @include failures
-- @include pause
-- @include keep_draining
-- @include despite_full

despite_full(meta)
local now = now_ms()
if writer_of(inc) ~= nonce then
  return {0}
end
local held = whole(redis.call('HGET', meta, 'version'), 1e6)
if held and held ~= tonumber(version) then
  return {0}
end
if not held then
  -- It was the worker's own when `inc` was registered.
  redis.call('HSET', meta, 'version', version)
end
local _, known_shards = read_meta(meta)
if not known_shards then
  redis.call('HSET', meta, 'block_size', block_size, 'shards', shards, 'incarnations', inc,
    'workers_ms', string.format('%d', now))
elseif known_shards ~= tonumber(shards) then
  return {0}
end
if not staged then
  if redis.call('HGET', current, worker) ~= inc then
    if serving(worker) then
      return {0}
    end
    redis.call('HSET', current, worker, inc)
  end
  if thorough or not parse_load(redis.call('HGET', load, inc)) then
    recount(inc, now)
  end
end
if redis.call('HGET', workers, inc) ~= info then
  redis.call('HSET', workers, inc, info)
  redis.call('HSET', meta, 'workers_ms', string.format('%d', now))
  changed(inc)
end
local drains = keep_draining(worker, ARGV[11] == '1', now)
local ends_ms = (drains or is_paused(inc, now)) and now or now + ttl_ms
redis.call('ZADD', leases, string.format('%d', ends_ms), inc)
if not redis.call('ZSCORE', versions, inc) then
  changed(inc)
end
return {redis.call('ZCARD', leases), drains and 1 or 0}
