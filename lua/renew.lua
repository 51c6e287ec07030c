-- renew: extends an incarnation's lease. A lapsed incarnation is revived, unless it has been retired:
-- its worker has only missed a renewal. If the worker has failed requests, the lease stays lapsed until
-- its pause ends or no other worker is left, though not for so long that it is retired. The same holds
-- if its agent takes its engine to be ill, as far as lib/may_lapse allows: what all agents see at once
-- is as a rule no illness of engines.
--
-- One engine is one worker: under a second id it is told of the first, as long as that one is routed to
-- and its agent is there.
--
-- Whatever Redis has lost of the worker, or of the namespace, comes back with the heartbeat.
--
-- KEYS[1] meta          hash   version, block_size, shards, incarnations, workers_ms
-- KEYS[2] workers       hash   inc -> info
-- KEYS[3] current       hash   worker -> inc
-- KEYS[4] leases        zset   inc -> expiry, ms, Redis clock
-- KEYS[5] writers       hash   inc -> nonce
-- KEYS[6] load          hash   inc -> load
-- KEYS[7] reservations  hash   request_id -> inc
-- KEYS[8] expiry        zset   request_id -> expiry, ms
-- KEYS[9] requests:     hashes inc -> its requests
-- KEYS[10] prefills:    lists  inc -> its requests still prefilling
-- KEYS[11] verdicts     hash   worker -> its marks; see lib/verdict
-- KEYS[12] versions      zset   inc -> version of its last change
-- KEYS[13] events        stream kind, subject, text
-- KEYS[14] engines:      strings engine -> the worker that it is
-- ARGV[1] worker        str    "<worker_id>:<dp_rank>"
-- ARGV[2] inc           int
-- ARGV[3] nonce         str    as registered
-- ARGV[4] ttl_ms        int    > 0
-- ARGV[5] info          JSON   WorkerInfo and lease_ttl_ms
-- ARGV[6] block_size    int    tokens
-- ARGV[7] shards        int    that `inc` publishes in
-- ARGV[8] staged        0|1    1: the worker is not switched over to `inc` yet
-- ARGV[9] thorough      0|1    1: recount the load even if it can be read
-- ARGV[10] version      int    of the data model that the worker speaks
-- ARGV[11] drains       0|1    1: as far as its agent knows, the worker is out of service
-- ARGV[12] ill          str    why its agent takes its engine to be ill; '': it is well
-- ARGV[13] tainted      0|1    1: as far as its agent knows, its engine is tainted; see `fetched_late`
-- ARGV[14] engine       str    which its engine is; '': not known
-- Returns  {n, drains, out, tainted, same}   renewed; how many incarnations have a lease, at least 1; whether
--                              the worker drains; whether it is out of service as its engine is ill;
--                              whether it is as that is tainted; the other worker that has the
--                              same engine and is routed to, or ''
--          {0}                 retired, unknown or replaced, or the index has other shards, or
--                              the namespace another version: the worker must register again
-- Cost     O(log workers); a count O(requests of the worker), 4 us each. Writes. Safe to retry.
local meta, workers, current, leases, writers = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local load, reservations, expiry, requests_prefix = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local prefills_prefix, verdicts, versions, events = KEYS[10], KEYS[11], KEYS[12], KEYS[13]
local worker, inc, nonce, ttl_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local info, block_size, shards = ARGV[5], ARGV[6], ARGV[7]
local staged, thorough, version, ill = ARGV[8] == '1', ARGV[9] == '1', ARGV[10], ARGV[12]
local engine = ARGV[14]
-- @include clock
-- @include number
-- @include meta
-- @include note_workers
-- @include writer
-- @include info
-- @include verdict
-- @include keep_verdict
-- @include serving
-- @include load
-- @include changed
-- @include record
-- @include recount
-- @include pause
-- @include may_lapse
-- @include tainted
-- @include despite_full
-- @include event

local ENGINE_KEPT_MS = 60000

despite_full(meta)
local now = now_ms()
if writer_of(inc) ~= nonce then
  return {0}
end
local held = whole(redis.call('HGET', meta, 'version'), 1e6)
if held and held ~= tonumber(version) then
  return {0}
end
if not held then
  -- It was the worker's own when `inc` was registered.
  redis.call('HSET', meta, 'version', version)
end
local _, known_shards = read_meta(meta)
if not known_shards then
  redis.call('HSET', meta, 'block_size', block_size, 'shards', shards, 'incarnations', inc,
    'workers_ms', string.format('%d', now))
elseif known_shards ~= tonumber(shards) then
  return {0}
end
if not staged then
  if redis.call('HGET', current, worker) ~= inc then
    if serving(worker) then
      return {0}
    end
    redis.call('HSET', current, worker, inc)
  end
  if thorough or not parse_load(redis.call('HGET', load, inc)) then
    recount(inc, now)
  end
end
if redis.call('HGET', workers, inc) ~= info then
  redis.call('HSET', workers, inc, info)
  note_workers(meta, now)
  changed(inc)
end
local marks = marks_of(worker, now)
local drains = keep_draining(marks, ARGV[11] == '1', now)
local tainted = keep_tainted(marks, info, ARGV[13] == '1', now)
local is_out = ill ~= '' and not staged and not drains and not tainted and may_lapse(inc, now)
if is_out and tonumber(redis.call('ZSCORE', leases, inc) or 0) > now then
  note_event('ill', worker, ill)
end
marks.ill = is_out and {since_ms = marks.ill and marks.ill.since_ms or now, cause = ill} or nil
if marks.away and is_told(marks.away) then
  note_event('back', worker)
end
marks.away = nil
keep_marks(worker, marks, now)
local is_failing = not staged and is_paused(inc, marks.failed, now)
local ends_ms = (drains or tainted or is_out or is_failing) and now or now + ttl_ms
redis.call('ZADD', leases, string.format('%d', ends_ms), inc)
if not redis.call('ZSCORE', versions, inc) then
  changed(inc)
end
local same = ''
if engine ~= '' and not staged then
  local other = redis.call('GET', KEYS[14] .. engine)
  local inc_of_other = other and serving(other)
  if other ~= worker and is_alive(inc_of_other, now) and not marks_of(other, now).away then
    same = other
  else
    redis.call('SET', KEYS[14] .. engine, worker, 'PX', ENGINE_KEPT_MS)
  end
end
return {
  redis.call('ZCARD', leases), drains and 1 or 0, is_out and 1 or 0, tainted and 1 or 0, same
}
