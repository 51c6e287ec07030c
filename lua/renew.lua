-- renew: extend an incarnation's lease. A lapsed incarnation is revived, unless it has been
-- retired since: its worker is alive, and has only missed a renewal.
--
-- The heartbeat also repairs what Redis keeps of the worker, as anybody may write to Redis. Damage
-- alone does not make a worker register again.
--
-- KEYS[1] meta          hash   block_size, shards, incarnations, workers_ms
-- KEYS[2] workers       hash   inc -> info
-- KEYS[3] current       hash   worker -> inc
-- KEYS[4] leases        zset   inc -> expiry, ms, Redis clock
-- KEYS[5] writers       hash   inc -> nonce
-- KEYS[6] load          hash   inc -> load
-- KEYS[7] reservations  hash   request_id -> inc
-- KEYS[8] expiry        zset   request_id -> expiry, ms
-- KEYS[9] requests:     hashes inc -> its requests
-- KEYS[10] prefills:    lists  inc -> its requests still prefilling
-- KEYS[11] metrics      stream
-- ARGV[1] worker        str    "<worker_id>:<dp_rank>"
-- ARGV[2] inc           int
-- ARGV[3] nonce         str    as registered
-- ARGV[4] ttl_ms        int    > 0
-- ARGV[5] info          JSON   WorkerInfo and lease_ttl_ms
-- ARGV[6] block_size    int    tokens
-- ARGV[7] shards        int    that `inc` publishes in
-- ARGV[8] staged        0|1    1: the worker is not switched over to `inc` yet
-- ARGV[9] thorough      0|1    1: recount the load even if it can be read
-- Returns  n                   renewed; how many incarnations have a lease, at least 1
--          0                   retired, unknown or replaced, or the index has other shards: the
--                              worker must register again
-- Cost     O(log workers); a count O(requests of the worker), 4 us each. Writes. Safe to retry.
local meta, workers, current, leases, writers = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local load, reservations, expiry, requests_prefix = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local prefills_prefix, metrics = KEYS[10], KEYS[11]
local worker, inc, nonce, ttl_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local info, block_size, shards = ARGV[5], ARGV[6], ARGV[7]
local staged, thorough = ARGV[8] == '1', ARGV[9] == '1'
-- @include clock
-- @include kinds
-- @include number
-- @include meta
-- @include writer
-- @include serving
-- @include load
-- @include request
-- @include recount
-- @include despite_full

despite_full(meta)
for _, key in ipairs({meta, workers, current, writers, load, reservations,
  requests_prefix .. inc}) do
  keep_kind(key, 'hash')
end
keep_kind(leases, 'zset')
keep_kind(expiry, 'zset')
keep_kind(prefills_prefix .. inc, 'list')
keep_kind(metrics, 'stream')

local now = now_ms()
-- Entry ids only ever increase; after one from the far future there is no room for more.
local newest = redis.call('XREVRANGE', metrics, '+', '-', 'COUNT', 1)[1]
if newest and tonumber(string.match(newest[1], '^%d+')) > now + 60000 then
  redis.call('DEL', metrics)
end

if writer_of(inc) ~= nonce then
  return 0
end
local known_block_size, known_shards = read_meta(meta)
if known_block_size ~= tonumber(block_size) then
  redis.call('HSET', meta, 'block_size', block_size, 'shards', shards,
    'workers_ms', string.format('%d', now))
elseif known_shards ~= tonumber(shards) then
  return 0
end
if (whole(redis.call('HGET', meta, 'incarnations'), 1e9) or 0) < tonumber(inc) then
  redis.call('HSET', meta, 'incarnations', inc)
end
if not staged then
  if redis.call('HGET', current, worker) ~= inc then
    if serving(worker) then
      return 0
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
end
redis.call('ZADD', leases, string.format('%d', now + ttl_ms), inc)
return redis.call('ZCARD', leases)
