-- What a worker's failures have come to: its circuit, which all routers share.
-- failures_of(inc, now): nil if nothing is known. count: failures in a row, up to 7; last_ms: when the
-- last one was; until_ms: until when it gets no requests; share: of its tries lately, those that
-- failed, in thousandths, as of at_ms; trial: whether it gets one request at a time, until it answers
-- one; cause: of the last failure.
-- no_failures(cause): the same of a worker before its first.
-- faded(f, now): its share by now. It fades by itself, so that nobody is avoided for ever.
-- keep_failures(inc, f, now): stores it, unless there is nothing left to know.
-- answered(inc, began_ms, now): the worker has answered a request whose try began then.
-- began_to_answer(inc, now): it has begun to answer one. That ends its trial, and what it failed before
-- is forgotten but for how many that were in a row.
-- Wants locals: failures; and lib number.
local SHARE_FADES_MS = 4000 -- by a factor of e
local SHARE_COUNTS = 100

local function failures_of(inc, now)
  local count, last_ms, until_ms, share, at_ms, trial, cause = string.match(
    redis.call('HGET', failures, inc) or '', '^(%d+) (%d+) (%d+) (%d+) (%d+) ([01]) ([%w_]+)$')
  local f = count and {
    count = whole(count, 7), last_ms = whole(last_ms, now), until_ms = whole(until_ms, now + 600000),
    share = whole(share, 1000), at_ms = whole(at_ms, now), trial = trial == '1', cause = cause,
  }
  return f and f.count and f.last_ms and f.until_ms and f.share and f.at_ms and f or nil
end

local function no_failures(cause)
  return {count = 0, last_ms = 0, until_ms = 0, share = 0, at_ms = 0, trial = false, cause = cause}
end

local function faded(f, now)
  return f.share * math.exp((f.at_ms - now) / SHARE_FADES_MS)
end

local function keep_failures(inc, f, now)
  if f.count == 0 and f.until_ms <= now and f.share < SHARE_COUNTS then
    redis.call('HDEL', failures, inc)
    return
  end
  redis.call('HSET', failures, inc, string.format('%d %d %d %d %d %d %s', f.count, f.last_ms,
    f.until_ms, math.floor(f.share + 0.5), now, f.trial and 1 or 0, f.cause))
end

local function began_to_answer(inc, now)
  local f = failures_of(inc, now)
  if f and f.trial and f.until_ms <= now then
    f.trial, f.share = false, 0
    keep_failures(inc, f, now)
  end
end

local function answered(inc, began_ms, now)
  began_to_answer(inc, now)
  local f = failures_of(inc, now)
  if f and began_ms > f.last_ms then
    f.count, f.share = 0, faded(f, now) * 0.7
    keep_failures(inc, f, now)
  end
end
