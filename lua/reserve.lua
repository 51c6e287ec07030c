-- reserve: promise a worker's capacity to a request, if the worker is still as the router saw it.
--
-- KEYS[1] leases         zset   inc -> expiry, ms
-- KEYS[2] load           hash   inc -> load
-- KEYS[3] reservations   hash   request_id -> inc
-- KEYS[4] expiry         zset   request_id -> expiry, ms
-- KEYS[5] requests:      hashes inc -> its requests
-- KEYS[6] prefills:      lists  inc -> its requests still prefilling
-- ARGV[1] inc            int    the chosen worker's
-- ARGV[2] request_id     str    a reservation it has already is given back first
-- ARGV[3] prefill_tokens int    tokens to compute
-- ARGV[4] prefill_us     int    predicted time to compute them
-- ARGV[5] blocks         int    KV blocks that the request keeps in use
-- ARGV[6] attempt        str    without spaces; tells this reservation from others of the request
-- ARGV[7] ttl_ms         int    > 0; forgotten after that, whatever becomes of the router
-- ARGV[8] max_requests   int    the worker is full at that many
-- ARGV[9] seen_total     int    reservations ever made on it when the router looked: one more by
--                               now and the choice is off. -1: take it all the same.
-- Returns  {1, total}           made; total includes it
--          {0, reason, now_ms, {inc, ...}, {inc, load, ...}}   "lapsed", "full" or "changed", and
--                               fresh loads to decide again from
-- Cost     O(log reservations); a refusal O(workers). Writes. Safe to retry.
local leases, load, reservations, expiry = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local requests_prefix, prefills_prefix = KEYS[5], KEYS[6]
local inc, request_id, prefill_tokens, prefill_us = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local blocks, attempt, ttl_ms = ARGV[5], ARGV[6], tonumber(ARGV[7])
local max_requests, seen_total = tonumber(ARGV[8]), tonumber(ARGV[9])
-- @include clock
-- @include number
-- @include load
-- @include request
-- @include snapshot
-- @include despite_full

despite_full(load)
local now = now_ms()
unreserve_expired(now, 16)
unreserve(request_id, now)

local function refuse(reason)
  local fresh = snapshot(now)
  return {0, reason, fresh[1], fresh[2], fresh[3]}
end

local lease = redis.call('ZSCORE', leases, inc)
local l = parse_load(redis.call('HGET', load, inc))
if not l or not lease or tonumber(lease) <= now then
  return refuse('lapsed')
end
if l.requests >= max_requests then
  return refuse('full')
end
if seen_total >= 0 and l.total ~= seen_total then
  return refuse('changed')
end

if l.requests == l.decoding then
  l.head_us, l.head_since_ms = tonumber(prefill_us), now
end
l.tokens = l.tokens + prefill_tokens
l.us = l.us + prefill_us
l.blocks = l.blocks + blocks
l.requests = l.requests + 1
l.total = l.total + 1
redis.call('HSET', load, inc, format_load(l))
redis.call('HSET', reservations, request_id, inc)
redis.call('ZADD', expiry, string.format('%d', now + ttl_ms), request_id)
redis.call('HSET', requests_prefix .. inc, request_id, format_request({
  tokens = prefill_tokens, us = prefill_us, blocks = blocks, state = 'p', attempt = attempt,
}))
redis.call('RPUSH', prefills_prefix .. inc, request_id)
return {1, l.total}
