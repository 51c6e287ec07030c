-- lease_renew: extend an incarnation's lease. One that lapsed is revived, unless it was retired
-- since: its worker is there, and has only missed a renewal.
--
-- The heartbeat also looks whether what is kept of the worker is whole, as anybody may write to
-- Redis: keys of another type are dropped, and whoever misses something registers again.
--
-- KEYS[1] meta          hash   block_size, shards, created_ms
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
-- ARGV[5] info          JSON   WorkerInfo
-- ARGV[6] staged        0|1    1: `inc` is not switched to yet
-- Returns  1
--          0                   retired, unknown or damaged: the worker must register again
-- Cost     O(log workers). Writes. Safe to retry.
local meta, workers, current, leases, writers = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local load, reservations, expiry, requests_prefix = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local prefills_prefix, metrics = KEYS[10], KEYS[11]
local worker, inc, nonce, ttl_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local info, staged = ARGV[5], ARGV[6] == '1'
-- @include clock
-- @include writer
-- @include load
-- @include request
-- @include kinds
-- @include meta

local requests, prefills = requests_prefix .. inc, prefills_prefix .. inc
for _, key in ipairs({meta, workers, current, writers, load, reservations, requests}) do
  keep_kind(key, 'hash')
end
keep_kind(leases, 'zset')
keep_kind(expiry, 'zset')
keep_kind(prefills, 'list')
keep_kind(metrics, 'stream')

-- Whether the load is that of the requests; of those, a few picked at random are looked at.
local function load_is_whole()
  local l = parse_load(redis.call('HGET', load, inc))
  if not l or l.requests ~= redis.call('HLEN', requests)
    or l.requests - l.decoding ~= redis.call('LLEN', prefills)
    or (l.requests == 0 and l.tokens + l.us + l.blocks > 0) then
    return false
  end
  local picked = redis.call('HRANDFIELD', requests, 4, 'WITHVALUES')
  for i = 1, #picked, 2 do
    if not parse_request(picked[i + 1]) or redis.call('HGET', reservations, picked[i]) ~= inc
      or not redis.call('ZSCORE', expiry, picked[i]) then
      return false
    end
  end
  return true
end

if not is_readable(meta) or writer_of(inc) ~= nonce
  or not redis.call('ZSCORE', leases, inc) then
  return 0
end
if not staged and (redis.call('HGET', current, worker) ~= inc or not load_is_whole()) then
  return 0
end
redis.call('ZADD', leases, string.format('%d', now_ms() + ttl_ms), inc)
redis.call('HSET', workers, inc, info)
return 1
