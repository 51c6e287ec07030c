-- The mark `late` of a worker, which is a price on it: see app/policy/view.py.
-- note_late(inc, late_ms, now): counts a first token that came late_ms later than predicted; 0: in time,
-- -1: not known. Nothing is looked up for one in time where no worker has marks.
-- Wants locals: verdicts; and libs info, verdict, keep_verdict.
local LATE_FADES_MS = 7000 -- by a factor of e
local LATE_LEAST_MS = 100

local function note_late(inc, late_ms, now)
  if late_ms < 0 or late_ms == 0 and redis.call('EXISTS', verdicts) == 0 then
    return
  end
  local worker = info_of(inc).worker
  local marks = worker and marks_of(worker, now) or {}
  if not worker or late_ms == 0 and not marks.late then
    return
  end
  local late = marks.late or {since_ms = now, until_ms = 0, count = 0, last_ms = 0, share = 0}
  local before_ms = (late.late_ms or 0) * math.exp(((late.at_ms or now) - now) / LATE_FADES_MS)
  late.late_ms = (before_ms + late_ms) / 2
  late.at_ms, late.last_ms = now, now
  late.cause = string.format('first tokens come %.1f s later than predicted', late.late_ms / 1000)
  marks.late = late.late_ms >= LATE_LEAST_MS and late or nil
  keep_marks(worker, marks, now)
end
