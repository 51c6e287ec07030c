-- retire: ends an incarnation now, as its agent does when it stops.
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
-- Returns  1
--          0            it had already ended
-- Cost     O(log workers + its requests). Writes. Safe to retry.
local workers, current, leases, writers, load = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local reservations, expiry, requests_prefix, prefills_prefix = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local verdicts, versions, events = KEYS[10], KEYS[11], KEYS[12]
local worker, inc, nonce = ARGV[1], ARGV[2], ARGV[3]
-- @include clock
-- @include writer
-- @include load
-- @include changed
-- @include record
-- @include request
-- @include verdict
-- @include keep_verdict
-- @include retire
-- @include event

if writer_of(inc) ~= nonce then
  return 0
end
local now = now_ms()
if redis.call('HGET', current, worker) == inc then
  keep_marks(worker, {tainted = marks_of(worker, now).tainted}, now)
  note_event('left', worker)
end
retire(inc, worker, now)
return 1
