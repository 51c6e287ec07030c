-- suspend: counts a worker's failure of a request. Its caller avoids the worker for a while; once there
-- are witnesses, all callers do: its lease lapses until it renews, and after more failures in a row for
-- longer.
--
-- The share of its tries that failed lately is kept, so that a worker which refuses at once does not
-- look idle. A worker that is alive after all renews within two seconds and loses nothing. One that
-- goes on failing stays lapsed for a pause that doubles with each failure, and then gets one request at
-- a time until it answers one. No more than lib/may_lapse allows are suspended: a client that reaches
-- no worker at all must not take them from all others.
--
-- KEYS[1] leases        zset  inc -> expiry, ms
-- KEYS[2] load          hash  inc -> load
-- KEYS[3] reservations  hash  request_id -> inc
-- KEYS[4] requests:     hashes inc -> its requests
-- KEYS[5] verdicts      hash  worker -> its marks; see lib/verdict
-- KEYS[6] current       hash  worker -> inc
-- KEYS[7] workers       hash  inc -> info
-- KEYS[8] events        stream  kind, subject, text
-- ARGV[1] inc           str   whose worker failed; '': that of the reservation
-- ARGV[2] id            str   of the request, or of the reservation
-- ARGV[3] caller        str   who sent the request; '': nobody knows
-- ARGV[4] counts        int   0: for the caller alone; 1: for all once another caller has seen failures
--                             there, too; 2: for all, as another worker has answered the request, or
--                             it never came there
-- ARGV[5] sent_ms       int   when the request was sent there; -1: as its reservation says
-- ARGV[6] failed_ms     int   when that failed; -1: now
-- ARGV[7] mark          str   `failed`, or `lacks <what>`: a model or path, for which the worker is left
--                             alone from the first failure on; its lease stays, unless it lacks several
-- ARGV[8] cause         str   of letters, digits and _
-- ARGV[9] weight        int   of the failure in the share, in thousandths; 0: it is none
-- ARGV[10] in_a_row     int   failures in a row from which on the worker is left alone; 0: from none
-- ARGV[11] most_ms      int   the longest pause
-- ARGV[12] pause_ms     int   at least so long, as the worker asks for
-- Returns  {inc, ...}         the lease of this one lapses now. None: there is no such reservation, the
--                             lease has lapsed already, too many have, or it is too few failures
-- Cost     O(log workers + workers with marks), with roles O(workers). Writes. Safe to retry.
local leases, load, reservations, requests_prefix = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local verdicts, current, workers, events = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local inc, caller, counts = ARGV[1], ARGV[3], tonumber(ARGV[4])
local sent_ms, failed_ms, cause = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[8]
local weight, in_a_row = tonumber(ARGV[9]), tonumber(ARGV[10])
local most_ms, pause_ms = tonumber(ARGV[11]), tonumber(ARGV[12])
-- @include clock
-- @include record
-- @include verdict
-- @include keep_verdict
-- @include info
-- @include may_lapse
-- @include despite_full
-- @include event

despite_full(reservations)
local now = now_ms()
local MANY_LACKED, MANY_CALLERS, MANY_WITNESSES = 4, 8, 4
if inc == '' then
  local _, request, found = find(ARGV[2])
  inc = found or ''
  sent_ms = sent_ms < 0 and request and began_ms_of(request.attempt) or sent_ms
end
local worker = info_of(inc).worker
if not worker or redis.call('HGET', current, worker) ~= inc then
  return {}
end
failed_ms = failed_ms >= 0 and math.min(failed_ms, now) or now
local marks = marks_of(worker, now)
local own = 'caller ' .. caller

-- The names of marks of a kind that count, besides one.
local function others(kind, name)
  local found = {}
  for other, mark in pairs(marks) do
    local is_kind = other ~= name and string.find(other, kind, 1, true) == 1
    found[#found + 1] = is_kind and not is_over(other, mark, now) and other or nil
  end
  return found
end

-- Returns the mark with the failure in it, and the pause that is due for it, in ms; nil: none is.
local function counted(name)
  local mark = marks[name]
  if not mark or is_over(name, mark, now) then
    mark = new_failures(cause, now)
    marks[name] = mark
  end
  -- A request that was sent before the last failure says nothing new of the worker.
  local is_new = in_a_row > 0 and (mark.last_ms == 0 or sent_ms > mark.last_ms)
  mark.share, mark.at_ms = faded(mark, now), now
  if is_new then
    mark.count, mark.last_ms, mark.cause = math.min(mark.count + 1, 7), failed_ms, cause
    mark.share = mark.share + (1000 - mark.share) * weight / 1000
  end
  if in_a_row > 0 and mark.count >= in_a_row or pause_ms > 0 then
    local doubled_ms = is_new and math.min(500 * 2 ^ mark.count, most_ms) or 0
    return mark, math.max(doubled_ms, pause_ms)
  end
  return mark
end

local function leave_alone(mark, for_ms)
  if for_ms then
    mark.since_ms, mark.until_ms = now, math.max(mark.until_ms, now + for_ms)
  end
end

local function count_for_caller()
  local callers = others('caller ', own)
  table.sort(callers, function(a, b) return marks[a].at_ms < marks[b].at_ms end)
  if #callers >= MANY_CALLERS then
    marks[callers[1]] = nil
  end
  leave_alone(counted(own))
end

local function has_witnesses()
  for _, other in ipairs(counts == 1 and others('caller ', own) or {}) do
    if faded(marks[other], now) >= SHARE_COUNTS then
      return true
    end
  end
  return counts == 2
end

-- Returns whether the lease lapses now.
local function count_for_all()
  if ARGV[7] ~= 'failed' and #others('lacks ', ARGV[7]) < MANY_LACKED then
    leave_alone(counted(ARGV[7]))
    return false
  end
  if tonumber(redis.call('ZSCORE', leases, inc) or 0) <= now then
    return false
  end
  local failed, for_ms = counted('failed')
  failed.witnesses = {caller}
  for _, other in ipairs(others('caller ', own)) do
    failed.witnesses[#failed.witnesses + 1] = #failed.witnesses < MANY_WITNESSES and string.sub(other, 8) or nil
  end
  if for_ms and may_lapse(inc, now) then
    -- The lease lapses until it is renewed in any case.
    leave_alone(failed, failed.count > 1 and for_ms or pause_ms)
    return true
  end
  -- The pause grows with those alone that it was left alone for.
  failed.count = math.min(failed.count, math.max(in_a_row, 1))
  return false
end

if counts < 2 and caller ~= '' then
  count_for_caller()
end
local lapses = has_witnesses() and count_for_all()
keep_marks(worker, marks, now)
if lapses then
  redis.call('ZADD', leases, string.format('%d', now), inc)
  note_event('suspended', worker, 'it failed ' .. ARGV[2] .. ': ' .. cause)
end
return {lapses and inc or nil}
