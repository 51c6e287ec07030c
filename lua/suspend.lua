-- suspend: a worker has failed a request, which counts for all routers; let its lease lapse until it
-- renews, and if it fails more in a row, for longer.
--
-- The share of its tries that failed lately is kept, so that a worker which refuses at once does not
-- look idle. One that is alive after all renews within two seconds and loses nothing. One that goes on
-- failing stays lapsed for a pause that doubles with each failure, and then gets one request at a time
-- until it answers one. No more than lib/may_lapse allows are suspended: a client that reaches no worker at all
-- must not take them from all others.
--
-- KEYS[1] leases        zset  inc -> expiry, ms
-- KEYS[2] load          hash  inc -> load
-- KEYS[3] reservations  hash  request_id -> inc
-- KEYS[4] requests:     hashes inc -> its requests
-- KEYS[5] failures      hash  inc -> what its failures have come to; worker -> whether it drains
-- KEYS[6] current       hash  worker -> inc
-- KEYS[7] workers       hash  inc -> info
-- KEYS[8] events        stream  kind, subject, text
-- ARGV[1] inc           str   whose worker failed; '': that of the reservation
-- ARGV[2] id            str   of the reservation, or of the request
-- ARGV[3] whose         str   of the reservation: `worker`; `source`; or `either`: the worker has, but
--                             its source, if it has one, may be at fault. Each is then counted half,
--                             and suspended from the second failure in a row on: what they do with
--                             others tells
-- ARGV[4] sent_ms       int   when the request was sent there; -1: as its reservation says
-- ARGV[5] cause         str   of letters, digits and _
-- ARGV[6] weight        int   of the failure in the share, in thousandths; 0: it is none, the worker
--                             only takes no more for now
-- ARGV[7] in_a_row      int   failures in a row from which on the worker is suspended; 0: never
-- ARGV[8] most_ms       int   the longest pause
-- ARGV[9] pause_ms      int   at least so long, as the worker asks for
-- ARGV[10] subject      str   the model or path that it lacks, for which it is left alone from the
--                             first failure on; its lease stays, unless it lacks several. '': all
-- Returns  {inc, ...}         the leases of these lapse now. None: there is no such reservation, the
--                             lease has lapsed already, too many have, or it is too few failures
-- Cost     O(log workers + workers that drain or failed), with roles O(workers). Writes. Safe to retry.
local leases, load, reservations, requests_prefix = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local failures, current, workers, events = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local cause, most_ms, pause_ms = ARGV[5], tonumber(ARGV[8]), tonumber(ARGV[9])
-- @include clock
-- @include number
-- @include record
-- @include failures
-- @include draining
-- @include info
-- @include may_lapse
-- @include despite_full
-- @include event

despite_full(reservations)
local now = now_ms()
local FORGOTTEN_MS = 60000
local MANY_SUBJECTS = 4

-- sent_ms: nil if nobody knows. Returns whether the lease lapses now.
local function count_against(inc, sent_ms, weight, in_a_row)
  if tonumber(inc and redis.call('ZSCORE', leases, inc) or 0) <= now then
    return false
  end
  local f = failures_of(inc, now) or no_failures(cause)
  -- A request that was sent before the last failure says nothing new of the worker.
  local is_new = weight > 0 and (f.last_ms == 0 or sent_ms and sent_ms > f.last_ms)
  f.share = faded(f, now)
  if is_new then
    f.count, f.last_ms, f.cause = f.count + 1, now, cause
    f.share = f.share + (1000 - f.share) * weight / 1000
  end
  local is_due = in_a_row > 0 and f.count >= in_a_row or weight == 0 and pause_ms > 0
  local lapses = is_due and may_lapse(inc, now)
  if lapses then
    local doubled_ms = is_new and f.count > 1 and math.min(500 * 2 ^ f.count, most_ms) or 0
    local longest_ms = math.max(doubled_ms, pause_ms)
    f.until_ms = longest_ms > 0 and math.max(f.until_ms, now + longest_ms) or f.until_ms
    f.trial = f.trial or weight > 0
  else
    -- The pause grows with those alone that it was left alone for.
    f.count = math.min(f.count, math.max(in_a_row, 1))
  end
  f.count = math.min(f.count, 7)
  keep_failures(inc, f, now)
  return lapses
end

local suspended = {}

-- How many subjects a worker lacks, lately, besides this one. Forgets older ones.
local function others_lacked(inc, subject)
  local num = 0
  for _, name in ipairs(redis.call('HKEYS', failures)) do
    local other = string.match(name, '^' .. inc .. ' (.+)$')
    local f = other and other ~= subject and failures_of(name, now)
    if f and f.until_ms + FORGOTTEN_MS < now then
      redis.call('HDEL', failures, name)
    elseif f then
      num = num + 1
    end
  end
  return num
end

local function count_subject(inc, subject, sent_ms)
  local name = inc .. ' ' .. subject
  local f = failures_of(name, now)
  f = f and f.until_ms + FORGOTTEN_MS > now and f or no_failures(cause)
  if sent_ms and sent_ms > f.last_ms then
    f.count, f.last_ms = math.min(f.count + 1, 7), now
    f.until_ms = now + math.min(500 * 2 ^ f.count, most_ms)
    keep_failures(name, f, now)
  end
end

local function blame(inc, request, weight, in_a_row)
  local sent_ms = tonumber(ARGV[4])
  if sent_ms < 0 then
    sent_ms = request and began_ms_of(request.attempt)
  end
  local subject = ARGV[10]
  if inc and subject ~= '' and others_lacked(inc, subject) < MANY_SUBJECTS then
    count_subject(inc, subject, sent_ms)
    return
  end
  if count_against(inc, sent_ms, weight, in_a_row) then
    redis.call('ZADD', leases, string.format('%d', now), inc)
    note_event('suspended', info_of(inc).worker or inc, 'it failed ' .. ARGV[2] .. ': ' .. cause)
    suspended[#suspended + 1] = inc
  end
end

local weight, in_a_row = tonumber(ARGV[6]), tonumber(ARGV[7])
local request_id, request, inc = find(ARGV[2])
local _, source, source_inc = find(source_of(request_id))
if ARGV[3] == 'source' then
  blame(source_inc, source, weight, in_a_row)
elseif ARGV[3] == 'either' and source_inc and request and request.has_source then
  for _, one in ipairs({inc, source_inc}) do
    blame(one, request, math.floor(weight / 2), math.max(in_a_row, 2))
  end
else
  blame(ARGV[1] ~= '' and ARGV[1] or inc, request, weight, in_a_row)
end
return suspended
