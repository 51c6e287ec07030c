-- answers_again: forgets the marks for which a worker was avoided, as it has answered.
--
-- KEYS[1] verdicts  hash  worker -> its marks; see lib/verdict
-- KEYS[2] current   hash  worker -> inc
-- ARGV[1] worker    str   "<worker_id>:<dp_rank>"
-- ARGV[2...] mark   str   `lacks <what>` or `caller <who>`
-- Returns  n              so many were known
-- Cost     O(1). Writes.
local verdicts, current, worker = KEYS[1], KEYS[2], ARGV[1]
-- @include clock
-- @include verdict
-- @include keep_verdict

local now, num = now_ms(), 0
local marks = marks_of(worker, now)
for i = 2, #ARGV do
  num = num + (marks[ARGV[i]] and 1 or 0)
  marks[ARGV[i]] = nil
end
keep_marks(worker, marks, now)
return num
