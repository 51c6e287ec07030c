-- Effects of answers on a worker's failures. Nothing is looked up where no worker has marks.
-- answered(inc, began_ms, now): ends the row of failures, after a request whose try began then.
-- began_to_answer(inc, now): ends the worker's trial, and forgets its failures but for their number in a
-- row.
-- Wants locals: verdicts; and libs info, verdict, keep_verdict.
local function failed_by(inc, now)
  local worker = redis.call('EXISTS', verdicts) == 1 and info_of(inc).worker
  local marks = worker and marks_of(worker, now) or {}
  return marks.failed, worker, marks
end

local function began_to_answer(inc, now)
  local failed, worker, marks = failed_by(inc, now)
  if failed and failed.until_ms > 0 and failed.until_ms <= now then
    failed.until_ms, failed.share = 0, 0
    keep_marks(worker, marks, now)
  end
end

local function answered(inc, began_ms, now)
  began_to_answer(inc, now)
  local failed, worker, marks = failed_by(inc, now)
  if failed and began_ms > failed.last_ms then
    failed.count, failed.share, failed.at_ms = 0, faded(failed, now) * 0.7, now
    keep_marks(worker, marks, now)
  end
end
