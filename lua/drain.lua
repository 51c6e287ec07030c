-- drain: sends nothing to a worker from now on, whoever renews its lease, until that is undone or
-- another process takes the worker over. Requests in flight there go on.
--
-- KEYS[1] current   hash  worker -> inc
-- KEYS[2] leases    zset  inc -> expiry, ms
-- KEYS[3] load      hash  inc -> load
-- KEYS[4] verdicts  hash  worker -> its marks; see lib/verdict
-- KEYS[5] events    stream  kind, subject, text
-- ARGV[1] worker    str   "<worker_id>:<dp_rank>"
-- ARGV[2] drains    0|1   0: undo it; routers see that once the worker has renewed its lease
-- Returns  n              requests that are reserved on it now
--          nil            there is no such worker
-- Cost     O(log workers). Writes. Safe to retry.
local current, leases, load, verdicts, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local worker, drains = ARGV[1], ARGV[2] == '1'
-- @include clock
-- @include load
-- @include verdict
-- @include keep_verdict
-- @include despite_full
-- @include event

despite_full(current)
local inc = redis.call('HGET', current, worker)
if not inc then
  return false
end
local now = now_ms()
local marks = marks_of(worker, now)
if drains then
  redis.call('ZADD', leases, string.format('%d', now), inc)
end
if drains ~= (marks.draining ~= nil) then
  marks.draining = drains and {since_ms = now} or nil
  marks.undone = not drains and {since_ms = now} or nil
  keep_marks(worker, marks, now)
  note_event(drains and 'drain' or 'undrain', worker)
end
local l = parse_load(redis.call('HGET', load, inc))
return l and l.requests or 0
