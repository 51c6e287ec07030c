-- suspend: a request's worker has failed it; let the worker's lease lapse until it renews.
--
-- A worker that is alive after all renews within two seconds and loses nothing. No more than a
-- quarter of all workers, or one, are suspended, and never the last: a client that reaches no
-- worker at all must not take them from all others. Incarnations that are not routed to yet have
-- leases too, but nothing in `load`.
--
-- KEYS[1] leases        zset  inc -> expiry, ms
-- KEYS[2] load          hash  inc -> load
-- KEYS[3] reservations  hash  request_id -> inc
-- KEYS[4] requests:     hashes inc -> its requests
-- ARGV[1] id            str   of the reservation, or of the request
-- Returns  inc                the lease of this one lapses now
--          nil                there is no such reservation, the lease has lapsed already, or too many
--                             have
-- Cost     O(log workers). Writes. Safe to retry.
local leases, load, reservations, requests_prefix = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
-- @include clock
-- @include record
-- @include despite_full

despite_full(reservations)
local now = now_ms()
local _, _, inc = find(ARGV[1])
local expiry_ms = tonumber(inc and redis.call('ZSCORE', leases, inc) or 0)
local all = redis.call('HLEN', load)
local lapsed = redis.call('ZCOUNT', leases, '-inf', now)
if expiry_ms <= now or all - lapsed < 2 or lapsed >= math.max(1, math.floor(all / 4)) then
  return false
end
redis.call('ZADD', leases, string.format('%d', now), inc)
return inc
