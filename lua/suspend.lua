-- suspend: a request's worker has failed it; let the worker's lease lapse until it renews, and if it
-- has failed others before, for longer.
--
-- A worker that is alive after all renews within two seconds and loses nothing. One that goes on
-- failing stays lapsed for a pause that doubles with each failure, up to a minute. No more than a
-- quarter of all workers in service, or one, are suspended, and never the last: a client that reaches
-- no worker at all must not take them from all others. Incarnations that are not routed to yet have
-- leases too, but nothing in `load`.
--
-- KEYS[1] leases        zset  inc -> expiry, ms
-- KEYS[2] load          hash  inc -> load
-- KEYS[3] reservations  hash  request_id -> inc
-- KEYS[4] requests:     hashes inc -> its requests
-- KEYS[5] failures      hash  inc -> count and time of the last; worker -> whether it drains
-- KEYS[6] current       hash  worker -> inc
-- KEYS[7] workers       hash  inc -> info
-- KEYS[8] events        stream  kind, subject, text
-- ARGV[1] id            str   of the reservation, or of the request
-- ARGV[2] of_source     0|1   1: its source has failed it
-- Returns  inc                the lease of this one lapses now
--          nil                there is no such reservation, the lease has lapsed already, or too many
--                             have
-- Cost     O(log workers + workers that drain or failed requests). Writes. Safe to retry.
local leases, load, reservations, requests_prefix = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local failures, current, workers, events = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
-- @include clock
-- @include number
-- @include record
-- @include failures
-- @include draining
-- @include despite_full
-- @include event

despite_full(reservations)
local now = now_ms()
local request_id, request, inc = find(ARGV[1])
if ARGV[2] == '1' then
  request_id, request, inc = find(source_of(request_id))
end
local expiry_ms = tonumber(inc and redis.call('ZSCORE', leases, inc) or 0)
local all = redis.call('HLEN', load)
local lapsed = redis.call('ZCOUNT', leases, '-inf', now)
for drains in pairs(draining()) do
  if redis.call('HEXISTS', load, drains) == 1 then
    all, lapsed = all - 1, lapsed - 1
  end
end
if expiry_ms <= now or all - lapsed < 2 or lapsed >= math.max(1, math.floor(all / 4)) then
  return false
end
redis.call('ZADD', leases, string.format('%d', now), inc)
local count, last_ms = failures_of(inc, now)
-- A request routed before the last failure says nothing new of the worker.
if count == 0 or request and began_ms_of(request.attempt) > last_ms then
  redis.call('HSET', failures, inc, string.format('%d %d', math.min(count + 1, 7), now))
end
local _, info = pcall(cjson.decode, redis.call('HGET', workers, inc))
note_event('suspended', type(info) == 'table' and info.worker or inc, 'it failed ' .. ARGV[1])
return inc
