-- register: begin an incarnation of a worker.
--
-- KEYS[1] meta          hash   made here if there is none
-- KEYS[2] workers       hash   inc -> info
-- KEYS[3] current       hash   worker -> inc
-- KEYS[4] leases        zset   inc -> expiry, ms
-- KEYS[5] applied       hash   inc -> "<seq> <nonce>"
-- KEYS[6] load          hash   inc -> load
-- KEYS[7] dead          set    inc
-- KEYS[8] reservations  hash   request_id -> inc
-- KEYS[9] expiry        zset   request_id -> expiry, ms
-- KEYS[10] requests:    hashes inc -> its requests
-- KEYS[11] prefills:    lists  inc -> its requests still prefilling
-- ARGV[1] worker        str    "<worker_id>:<dp_rank>"
-- ARGV[2] nonce         str    without blanks; tells this process from any other
-- ARGV[3] ttl_ms        int    > 0
-- ARGV[4] info          JSON   WorkerInfo
-- ARGV[5] block_size    int    tokens
-- ARGV[6] bucket_bits   int    1-24; counts only where the namespace is new
-- ARGV[7] resync        0|1    1: the same process again. While its present incarnation lives, the
--                              new one is staged: not routed to until `activate`.
-- Returns  {1, inc, staged}
--          {0, block_size}     of the namespace, which differs
--          {-1}                another process has taken the worker over, and lives
-- Cost     O(log workers + requests of the incarnation replaced). Writes.
local meta, workers, current, leases, applied = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local load, dead, reservations, expiry = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local requests_prefix, prefills_prefix = KEYS[10], KEYS[11]
local worker, nonce, ttl_ms, info = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local block_size, bucket_bits, resync = ARGV[5], ARGV[6], ARGV[7] == '1'
-- @include clock
-- @include writer
-- @include retire
-- @include activate

local now = now_ms()
local known = redis.call('HGET', meta, 'block_size')
if not known then
  redis.call('HSET', meta, 'block_size', block_size, 'bucket_bits', bucket_bits,
    'created_ms', string.format('%d', now))
elseif known ~= block_size then
  return {0, known}
end

local old = redis.call('HGET', current, worker)
local old_expiry = old and redis.call('ZSCORE', leases, old)
local old_lives = old_expiry and tonumber(old_expiry) > now
if resync and old_lives and writer_of(old) ~= nonce then
  return {-1}
end

local inc = string.format('%d', redis.call('HINCRBY', meta, 'incarnations', 1))
redis.call('HSET', workers, inc, info)
redis.call('HSET', applied, inc, '0 ' .. nonce)
redis.call('ZADD', leases, string.format('%d', now + ttl_ms), inc)

if resync and old_lives then
  return {1, inc, 1}
end
activate(worker, inc, resync)
return {1, inc, 0}
