-- register: begins an incarnation of a worker. It is staged: not routed to until `activate`, as its
-- number may turn out not to be free in the index (see open_shard), and nothing is published under it.
--
-- KEYS[1] meta          hash   created here if there is no readable one
-- KEYS[2] workers       hash   inc -> info
-- KEYS[3] current       hash   worker -> inc
-- KEYS[4] leases        zset   inc -> expiry, ms
-- KEYS[5] writers       hash   inc -> nonce
-- KEYS[6] load          hash   inc -> load
-- KEYS[7] reservations  hash   request_id -> inc
-- KEYS[8] expiry        zset   request_id -> expiry, ms
-- KEYS[9] versions      zset   inc -> version of its last change
-- KEYS[10] verdicts     hash   worker -> its marks; see lib/verdict
-- ARGV[1] worker        str    "<worker_id>:<dp_rank>"
-- ARGV[2] nonce         str    distinguishes this process from any other
-- ARGV[3] ttl_ms        int    > 0
-- ARGV[4] info          JSON   WorkerInfo and lease_ttl_ms
-- ARGV[5] block_size    int    tokens
-- ARGV[6] shards        int    1-1,024, of the index; counts only if the namespace is new
-- ARGV[7] previous      str    inc that the same process acted as; '': the process is new
-- ARGV[8] version       int    of the data model that the worker speaks
-- Returns  {1, inc, lives, shards}    lives: 1 if the incarnation to be replaced is of the same
--                              process and is routed to meanwhile; shards: of the namespace
--          {0, block_size}     of the namespace, which differs
--          {-2, version}       of the namespace's data model, which the worker does not speak
--          {-1}                another process has taken over the worker, and is alive
-- Cost     O(log workers). Writes.
local meta, workers, current, leases, writers = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local load, reservations, expiry, versions = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local verdicts = KEYS[10]
local worker, nonce, ttl_ms, info = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local block_size, shards, previous, version = ARGV[5], ARGV[6], ARGV[7], ARGV[8]
-- @include clock
-- @include number
-- @include meta
-- @include note_workers
-- @include writer
-- @include info
-- @include verdict
-- @include serving
-- @include changed
-- @include despite_full

despite_full(meta)

local now = now_ms()
local other = other_version(meta, workers, tonumber(version))
if other then
  return {-2, other}
end
local known, known_shards = read_meta(meta)
if known and known ~= tonumber(block_size) then
  return {0, known}
end
if previous ~= '' and is_replaced(worker, previous, nonce, now) then
  return {-1}
end
local lives = previous ~= '' and is_alive(predecessor(worker, previous), now)
if not known then
  redis.call('HSET', meta, 'block_size', block_size, 'shards', shards)
end
redis.call('HSET', meta, 'version', version)

-- A Redis that lost data may count from a number that is in use.
local function is_known(inc)
  return writer_of(inc) or redis.call('ZSCORE', leases, inc)
    or redis.call('HEXISTS', workers, inc) == 1 or redis.call('HEXISTS', load, inc) == 1
end
local inc
repeat
  inc = string.format('%d', redis.call('HINCRBY', meta, 'incarnations', 1))
until not is_known(inc)
note_workers(meta, now)
redis.call('HSET', workers, inc, info)
redis.call('HSET', writers, inc, nonce)
redis.call('ZADD', leases, string.format('%d', now + ttl_ms), inc)
changed(inc)
return {1, inc, lives and 1 or 0, known_shards or shards}
