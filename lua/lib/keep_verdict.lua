-- Writing of workers' records (lib/verdict).
-- keep_marks(worker, marks, now): writes marks, but for failures that are long over.
-- is_over(name, mark, now): whether a mark no longer counts.
-- new_failures(cause, now): returns the mark of a worker before its first failure.
-- keep_draining(marks, says_so, now): whether a worker drains. Its agent, which was told when it last
-- renewed and outlives a loss of data, says so or does not.
-- VOUCHED_MS: how long routers vouch for an engine whose agent is away, each time. is_told(away):
-- whether operators were told: not of an agent that was only late.
-- Wants locals: verdicts; and lib verdict.
local SHARE_COUNTS = 100
local FORGOTTEN_MS = 60000
local VOUCHED_MS = 3000
local LATE_FORGOTTEN_MS = 120000
local STAYS = {tainted = 1, draining = 1, ill = 1, away = 1, undone = 1, gone = 1}

local function is_over(name, mark, now)
  if STAYS[name] then
    return false
  end
  if name == 'late' then
    return mark.at_ms + LATE_FORGOTTEN_MS < now
  end
  local forgotten_ms = math.max(mark.until_ms, mark.last_ms) + FORGOTTEN_MS
  return mark.until_ms <= now and faded(mark, now) < SHARE_COUNTS
    and (mark.count == 0 or name ~= 'failed' and forgotten_ms < now)
end

local function keep_marks(worker, marks, now)
  local kept = {}
  for name, mark in pairs(marks) do
    if not is_over(name, mark, now) then
      kept[name] = {}
      for field, value in pairs(mark) do
        value = type(value) == 'number' and math.floor(value + 0.5) or value
        kept[name][field] = value ~= 0 and value or nil
      end
    end
  end
  if next(kept) then
    redis.call('HSET', verdicts, worker, cjson.encode(kept))
  else
    redis.call('HDEL', verdicts, worker)
  end
end

local function new_failures(cause, now)
  return {
    since_ms = now, until_ms = 0, count = 0, last_ms = 0, share = 0, at_ms = 0, cause = cause,
  }
end

local function keep_draining(marks, says_so, now)
  if marks.undone then
    marks.draining, marks.undone = nil, nil
  elseif says_so then
    marks.draining = marks.draining or {since_ms = now}
  end
  return marks.draining ~= nil
end

local function is_told(away)
  return away.until_ms - away.since_ms > VOUCHED_MS
end
