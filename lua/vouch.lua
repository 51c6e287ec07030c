-- vouch: extends the leases of workers whose engines routers have heard while their agents do not
-- renew, as an agent's silence is not its engine's death.
--
-- No other process may act as these incarnations: their blocks stay as they were published last. A
-- lease that an agent still has in hand is left alone, and so are staged incarnations. A worker that
-- drains, is tainted, or is paused for its failures stays lapsed, though not for so long that it is
-- retired. One that its agent took to be ill gets one request at a time until it answers one.
--
-- KEYS[1] workers       hash   inc -> info
-- KEYS[2] current       hash   worker -> inc
-- KEYS[3] leases        zset   inc -> expiry, ms
-- KEYS[4] load          hash   inc -> load
-- KEYS[5] verdicts      hash   worker -> its marks; see lib/verdict
-- KEYS[6] events        stream kind, subject, text
-- KEYS[7] engines:      strings engine -> the worker that it is
-- ARGV[1] most_ms       int    for how long an agent may be away
-- ARGV[2...] inc        int    whose engines answer
-- Returns  {vouched, ...}      for each, in order: 1; or 0: not, or there was no need to
-- Cost     O(incarnations * log workers). Writes. Safe to retry.
local workers, current, leases, load = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local verdicts, events, engines_prefix = KEYS[5], KEYS[6], KEYS[7]
local most_ms = tonumber(ARGV[1])
-- @include clock
-- @include info
-- @include verdict
-- @include keep_verdict
-- @include pause
-- @include despite_full
-- @include event

despite_full(load)
local now = now_ms()
local LATE_MS = 1000 -- or a third of the lease: an agent renews long before
-- An agent whose worker is out of service renews a lease that has lapsed, every two seconds.
local SILENT_MS = 3000

-- Whether its agent still has the lease in hand. is_away: it had not when a router last vouched. May
-- be cut: its lease may have lapsed without its agent having missed a renewal.
local function is_held(marks, lease_ms, ttl_ms, is_away)
  local left_ms = lease_ms - now
  local may_be_cut = marks.ill or marks.failed or marks.draining or marks.tainted
  return left_ms > math.min(LATE_MS, ttl_ms / 3)
    or left_ms <= 0 and left_ms > -SILENT_MS and not is_away and may_be_cut
end

-- Whether its engine has come to be another worker, whose agent is there.
local function is_another(info)
  local worker = redis.call('GET', engines_prefix .. tostring(info.engine_id))
  return worker and worker ~= info.worker
end

local function vouch(inc)
  local info = info_of(inc)
  local lease_ms = tonumber(redis.call('ZSCORE', leases, inc) or '')
  local ttl_ms = tonumber(info.lease_ttl_ms)
  if not lease_ms or not ttl_ms or type(info.worker) ~= 'string'
    or redis.call('HGET', current, info.worker) ~= inc or redis.call('HEXISTS', load, inc) == 0
    or is_another(info) then
    return 0
  end
  local marks = marks_of(info.worker, now)
  local away = marks.away
  local is_away = away and lease_ms <= away.until_ms -- else it has renewed since
  if not is_away then
    away = {since_ms = now, until_ms = now}
  end
  if is_held(marks, lease_ms, ttl_ms, is_away) or now - away.since_ms >= most_ms then
    return 0
  end
  if away.until_ms > away.since_ms and not is_told(away) then
    note_event('away', info.worker, 'its agent is not heard of, its engine answers')
  end
  if marks.ill then
    local failed = marks.failed or new_failures('ill', now)
    failed.count, failed.until_ms = math.max(failed.count, 1), math.max(failed.until_ms, now)
    marks.failed, marks.ill = failed, nil
  end
  away.until_ms = now + VOUCHED_MS
  marks.away = away
  keep_marks(info.worker, marks, now)
  local is_out = marks.draining or marks.tainted or is_paused(inc, marks.failed, now)
  local lasts_ms = is_out and 0 or math.min(VOUCHED_MS, ttl_ms)
  redis.call('ZADD', leases, string.format('%d', now + lasts_ms), inc)
  return 1
end

local vouched = {}
for i = 2, #ARGV do
  vouched[#vouched + 1] = vouch(ARGV[i])
end
return vouched
