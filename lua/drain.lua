-- drain: from now on nothing goes to a worker, whoever renews its lease, until it is undone or another
-- process takes the worker over. What is in flight there goes on. Marks of workers that have been gone
-- for a day are dropped.
--
-- KEYS[1] current   hash  worker -> inc
-- KEYS[2] leases    zset  inc -> expiry, ms
-- KEYS[3] load      hash  inc -> load
-- KEYS[4] failures  hash  worker -> "draining" and since when
-- KEYS[5] events    stream  kind, subject, text
-- ARGV[1] worker    str   "<worker_id>:<dp_rank>"
-- ARGV[2] drains    0|1   0: undo it; routers see that once the worker has renewed its lease
-- Returns  n              requests that are reserved on it now
--          nil            there is no such worker
-- Cost     O(workers that drain or failed requests). Writes. Safe to retry.
local current, leases, load, failures, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local worker, drains = ARGV[1], ARGV[2] == '1'
-- @include clock
-- @include load
-- @include draining
-- @include despite_full
-- @include event

despite_full(current)
local inc = redis.call('HGET', current, worker)
if not inc then
  return false
end
if drains then
  local now = now_ms()
  if not is_draining(worker) then
    redis.call('HSET', failures, worker, string.format('draining %d', now))
    note_event('drain', worker)
  end
  redis.call('ZADD', leases, string.format('%d', now), inc)
  for _, name in ipairs(redis.call('HKEYS', failures)) do
    local since_ms = string.match(redis.call('HGET', failures, name), '^draining (%d+)$')
    if since_ms and now - since_ms > 86400000 and redis.call('HEXISTS', current, name) == 0 then
      redis.call('HDEL', failures, name)
    end
  end
elseif is_draining(worker) then
  redis.call('HSET', failures, worker, 'undone')
  note_event('undrain', worker)
end
local l = parse_load(redis.call('HGET', load, inc))
return l and l.requests or 0
