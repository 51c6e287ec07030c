-- drain: from now on nothing goes to a worker, whoever renews its lease, until it is undone or another
-- process takes the worker over. What is in flight there goes on.
--
-- KEYS[1] current   hash  worker -> inc
-- KEYS[2] leases    zset  inc -> expiry, ms
-- KEYS[3] load      hash  inc -> load
-- KEYS[4] failures  hash  inc -> count and time of the last, or "draining"
-- ARGV[1] worker    str   "<worker_id>:<dp_rank>"
-- ARGV[2] drains    0|1   0: undo it; routers see that once the worker has renewed its lease
-- Returns  n              requests that are reserved on it now
--          nil            there is no such worker
-- Cost     O(log workers). Writes. Safe to retry.
local current, leases, load, failures = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local worker, drains = ARGV[1], ARGV[2] == '1'
-- @include clock
-- @include load
-- @include despite_full

despite_full(current)
local inc = redis.call('HGET', current, worker)
if not inc then
  return false
end
if drains then
  redis.call('HSET', failures, inc, 'draining')
  redis.call('ZADD', leases, string.format('%d', now_ms()), inc)
elseif redis.call('HGET', failures, inc) == 'draining' then
  redis.call('HDEL', failures, inc)
end
local l = parse_load(redis.call('HGET', load, inc))
return l and l.requests or 0
