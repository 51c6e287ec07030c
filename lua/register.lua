-- register: begin an incarnation of a worker.
--
-- KEYS[1] meta          hash   made here if there is none
-- KEYS[2] workers       hash   inc -> info
-- KEYS[3] current       hash   worker -> inc
-- KEYS[4] leases        zset   inc -> expiry, ms
-- KEYS[5] writers       hash   inc -> nonce
-- KEYS[6] load          hash   inc -> load
-- KEYS[7] reservations  hash   request_id -> inc
-- KEYS[8] expiry        zset   request_id -> expiry, ms
-- KEYS[9] requests:     hashes inc -> its requests
-- KEYS[10] prefills:    lists  inc -> its requests still prefilling
-- ARGV[1] worker        str    "<worker_id>:<dp_rank>"
-- ARGV[2] nonce         str    tells this process from any other
-- ARGV[3] ttl_ms        int    > 0
-- ARGV[4] info          JSON   WorkerInfo
-- ARGV[5] block_size    int    tokens
-- ARGV[6] shards        int    of the index; counts only where the namespace is new
-- ARGV[7] resync        0|1    1: the same process again. While its present incarnation lives, the
--                              new one is staged: not routed to until `activate`.
-- Returns  {1, inc, staged, shards}    shards: of the namespace
--          {0, block_size}     of the namespace, which differs
--          {-1}                another process has taken the worker over, and lives
-- Cost     O(log workers + requests of the incarnation replaced). Writes.
local meta, workers, current, leases, writers = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local load, reservations, expiry, requests_prefix = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local prefills_prefix = KEYS[10]
local worker, nonce, ttl_ms, info = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local block_size, shards, resync = ARGV[5], ARGV[6], ARGV[7] == '1'
-- @include clock
-- @include meta
-- @include writer
-- @include load
-- @include request
-- @include retire
-- @include recount
-- @include activate

local now = now_ms()
local known, known_shards = unpack(redis.call('HMGET', meta, 'block_size', 'shards'))
if not is_readable(meta) then
  redis.call('HSET', meta, 'block_size', block_size, 'shards', shards,
    'created_ms', string.format('%d', now))
  known_shards = shards
elseif known ~= block_size then
  return {0, known}
end

local old = redis.call('HGET', current, worker)
local old_expiry = old and redis.call('ZSCORE', leases, old)
local old_lives = old_expiry and tonumber(old_expiry) > now
if resync and old_lives and writer_of(old) ~= nonce then
  return {-1}
end

-- A Redis that lost its last writes may count from a number that is in use.
local inc
repeat
  inc = string.format('%d', redis.call('HINCRBY', meta, 'incarnations', 1))
until redis.call('HEXISTS', writers, inc) == 0
redis.call('HSET', workers, inc, info)
redis.call('HSET', writers, inc, nonce)
redis.call('ZADD', leases, string.format('%d', now + ttl_ms), inc)

if resync and old_lives then
  return {1, inc, 1, known_shards}
end
activate(worker, inc, resync, now)
return {1, inc, 0, known_shards}
