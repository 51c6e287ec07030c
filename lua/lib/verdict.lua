-- The record of a worker that does not simply serve: JSON, in one field of `verdicts` for each worker, by
-- the names of what speaks against it, its marks. It outlives an incarnation.
--   tainted, draining   it gets no requests, however few others are left
--   ill, away           as its agent takes its engine to be; as its agent is not heard of
--   failed              what its failures have come to, for all callers
--   late                its first tokens come late_ms later than predicted, as of at_ms
--   lacks <what>        for a model or path; caller <who>: for one caller alone
--   undone, gone        its agent is to hear that it drains no more; no process acts as it
-- Each has since_ms, until_ms, cause and witnesses as far as they are known, and of failures count: in a
-- row, up to 7; last_ms: when the last one was; share: of its tries lately, those that failed, in
-- thousandths, as of at_ms.
-- marks_of(worker, now): returns the readable marks.
-- faded(mark, now): returns a mark's share by now, which fades, so that nobody is avoided for ever.
-- out_of_service(now): returns the incs of all that drain or are tainted.
-- Wants locals: current, verdicts.
local SHARE_FADES_MS = 4000 -- by a factor of e
local LATE_MOST_MS = 600000
local LATEST = {since_ms = 0, last_ms = 0, at_ms = 0, until_ms = 600000} -- behind now

local function sound(number, most)
  return type(number) == 'number' and number >= 0 and number <= most and math.floor(number) or 0
end

local function marks_of(worker, now)
  local _, told = pcall(cjson.decode, redis.call('HGET', verdicts, worker) or nil)
  local marks = {}
  for name, mark in pairs(type(told) == 'table' and told or {}) do
    if type(mark) == 'table' then
      for field, later_ms in pairs(LATEST) do
        mark[field] = sound(mark[field], now + later_ms)
      end
      mark.count, mark.share = sound(mark.count, 7), sound(mark.share, 1000)
      mark.late_ms = sound(mark.late_ms, LATE_MOST_MS)
      marks[name] = mark
    end
  end
  return marks
end

local function faded(mark, now)
  return mark.share * math.exp((mark.at_ms - now) / SHARE_FADES_MS)
end

local function out_of_service(now)
  local incs = {}
  for _, worker in ipairs(redis.call('HKEYS', verdicts)) do
    local marks = marks_of(worker, now)
    incs[#incs + 1] = (marks.tainted or marks.draining) and redis.call('HGET', current, worker) or nil
  end
  return incs
end
