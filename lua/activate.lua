-- activate: routes to a worker's new incarnation, which may publish, and retires the previous one, in
-- one step.
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
-- KEYS[10] verdicts     hash   worker -> its marks; see lib/verdict
-- KEYS[11] versions      zset   inc -> version of its last change
-- KEYS[12] events       stream kind, subject, text
-- ARGV[1] worker        str    "<worker_id>:<dp_rank>"
-- ARGV[2] inc           int
-- ARGV[3] nonce         str    as registered
-- ARGV[4] previous      str    inc that the same process acted as, whose in-flight requests are
--                              taken over; '': a new process, which knows of none, but takes over
--                              those at its address for which routers vouch
-- ARGV[5] drains        0|1    1: as far as that process knows, the worker is out of service. A new
--                              process puts it back into service
-- ARGV[6] tainted       0|1    1: as far as it knows, its engine is tainted; see `taint`. A new process
--                              changes nothing in that
-- Returns  1
--          0            the incarnation is lost, or another process has taken over the worker:
--                       register again
-- Cost     O(log workers + requests in flight). Writes. Safe to retry.
local workers, current, leases, writers, load = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local reservations, expiry, requests_prefix, prefills_prefix = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local verdicts, versions, events = KEYS[10], KEYS[11], KEYS[12]
local worker, inc, nonce, previous = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
-- @include clock
-- @include writer
-- @include info
-- @include verdict
-- @include keep_verdict
-- @include serving
-- @include load
-- @include changed
-- @include record
-- @include request
-- @include retire
-- @include recount
-- @include pause
-- @include tainted
-- @include event

local function take_over(old)
  for _, request_id in ipairs(redis.call('HKEYS', requests_prefix .. old)) do
    if redis.call('HGET', reservations, request_id) == old then
      redis.call('HSET', reservations, request_id, inc)
    end
  end
  for _, prefix in ipairs({requests_prefix, prefills_prefix}) do
    if redis.call('EXISTS', prefix .. old) == 1 then
      redis.call('RENAME', prefix .. old, prefix .. inc)
    end
  end
  redis.call('HSET', load, inc, redis.call('HGET', load, old) or '')
end

local now = now_ms()
local marks = marks_of(worker, now)

-- Whether only the agent is a new process: what is in flight goes on beside it.
local function is_same_engine(old)
  return is_alive(old, now) and marks.away and info_of(old).address == info_of(inc).address
end

if writer_of(inc) ~= nonce or (previous ~= '' and is_replaced(worker, previous, nonce, now)) then
  return 0
end
if redis.call('HGET', current, worker) == inc then
  return 1
end
-- If Redis lost everything, the number may be the same as the one it had before.
local old = predecessor(worker, previous ~= inc and previous or '')
redis.call('DEL', requests_prefix .. inc, prefills_prefix .. inc)
if old and (previous ~= '' or is_same_engine(old)) then
  take_over(old)
end
recount(inc, now)
changed(inc)
if old then
  retire(old, worker, now)
end
redis.call('HSET', current, worker, inc)
if previous == '' then
  marks = {tainted = marks.tainted}
end
marks.away, marks.gone = nil, nil
local drains = keep_draining(marks, ARGV[5] == '1', now)
local tainted = keep_tainted(marks, redis.call('HGET', workers, inc), ARGV[6] == '1', now)
keep_marks(worker, marks, now)
if drains or tainted or is_paused(inc, marks.failed, now) then
  redis.call('ZADD', leases, string.format('%d', now), inc)
end
note_event(previous == '' and 'joined' or 'resynced', worker, 'incarnation ' .. inc)
return 1
