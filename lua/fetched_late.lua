-- fetched_late: takes workers out of service that may hold KV of one prompt as another's: a source's
-- engine has counted fetches after their lease had ended, and these targets may have made them. Nothing
-- goes to a target, even if it is the last worker, until its engine has begun anew or dropped what it
-- holds.
--
-- KEYS[1] workers   hash  inc -> info
-- KEYS[2] current   hash  worker -> inc
-- KEYS[3] leases    zset  inc -> expiry, ms
-- KEYS[4] verdicts  hash  worker -> its marks; see lib/verdict
-- KEYS[5] events    stream  kind, subject, text
-- KEYS[6] fetches   zset  attempt -> until when, ms; see lib/fetches
-- KEYS[7] fetching  hash  attempt -> what it fetches
-- ARGV[1] source    str   "<worker_id>:<dp_rank>"
-- Returns  {worker, ...}  those that are tainted since this call
-- Cost     O(fetches past their lease * log workers). Writes. Safe to retry.
local workers, current, leases, verdicts, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local fetches, fetching = KEYS[6], KEYS[7]
local source = ARGV[1]
-- @include clock
-- @include verdict
-- @include keep_verdict
-- @include tainted
-- @include fetches
-- @include despite_full
-- @include event

local WHY = 'it may have fetched KV of other prompts, after a lease of ' .. source .. ' had ended'

despite_full(verdicts)
local now = now_ms()

-- life: of its engine when it was given what it may have fetched. Whether it was not tainted.
local function taint(worker, life)
  local inc = redis.call('HGET', current, worker)
  local lives = life_in(inc and redis.call('HGET', workers, inc))
  if lives ~= '' and life ~= '-' and process_of(lives) ~= process_of(life) then
    return false
  end
  if inc then
    redis.call('ZADD', leases, string.format('%d', now), inc)
  end
  local marks = marks_of(worker, now)
  local is_new = not marks.tainted
  marks.tainted = {
    since_ms = is_new and now or marks.tainted.since_ms,
    life = lives ~= '' and lives or life ~= '-' and life or '',
    cause = WHY,
  }
  marks.gone = not inc and {since_ms = now} or nil
  keep_marks(worker, marks, now)
  if is_new then
    note_event('tainted', worker, WHY)
  end
  return is_new
end

local tainted = {}
local _, records = late_fetches(now)
for _, record in ipairs(records) do
  local from, worker, _, life = string.match(record or '', '^(%S+) (%S+) (%S+) (%S+) %d+$')
  if from == source and taint(worker, life) then
    tainted[#tainted + 1] = worker
  end
end
return tainted
