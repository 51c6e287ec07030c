-- taint: a worker's engine may hold KV of one prompt as another's. From now on nothing goes there,
-- whoever renews its lease, and be it the last worker, until its engine has begun anew or dropped what
-- it holds.
--
-- KEYS[1] workers   hash  inc -> info
-- KEYS[2] current   hash  worker -> inc
-- KEYS[3] leases    zset  inc -> expiry, ms
-- KEYS[4] verdicts  hash  worker -> its marks; see lib/verdict
-- KEYS[5] events    stream  kind, subject, text
-- ARGV[1] worker    str   "<worker_id>:<dp_rank>"
-- ARGV[2] life      str   of its engine, as registered when it was given what tainted it
-- ARGV[3] why       str
-- Returns  1              marked
--          0              it was, or its engine has begun anew since
-- Cost     O(log workers). Writes. Safe to retry.
local workers, current, leases, verdicts, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local worker, life, why = ARGV[1], ARGV[2], ARGV[3]
-- @include clock
-- @include verdict
-- @include keep_verdict
-- @include tainted
-- @include despite_full
-- @include event

despite_full(verdicts)
local now = now_ms()
local inc = redis.call('HGET', current, worker)
local lives = life_in(inc and redis.call('HGET', workers, inc))
if lives ~= '' and life ~= '' and process_of(lives) ~= process_of(life) then
  return 0
end
if inc then
  redis.call('ZADD', leases, string.format('%d', now), inc)
end
local marks = marks_of(worker, now)
local is_new = not marks.tainted
marks.tainted = {
  since_ms = is_new and now or marks.tainted.since_ms, life = lives ~= '' and lives or life, cause = why,
}
marks.gone = not inc and {since_ms = now} or nil
keep_marks(worker, marks, now)
if is_new then
  note_event('tainted', worker, why)
end
return is_new and 1 or 0
