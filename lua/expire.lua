-- expire: forget reservations whose time is up.
--
-- An expiry later than any router asks for is lowered to that, and one without a reservation to
-- grace_ms; a reservation without a record is dropped. All this comes from tampering with Redis;
-- each step checks 8 for it. If a record is left, its worker's heartbeat restores the rest.
--
-- KEYS[1] load           hash   inc -> load
-- KEYS[2] reservations   hash   request_id -> inc
-- KEYS[3] expiry         zset   request_id -> expiry, ms
-- KEYS[4] requests:      hashes inc -> its requests
-- KEYS[5] prefills:      lists  inc -> its requests still prefilling
-- ARGV[1] limit          int    how many at most
-- ARGV[2] ttl_ms         int    > 0, of reservations; if routers differ, the shortest applies
-- ARGV[3] grace_ms       int    longer than workers take from one heartbeat to the next
-- Returns  how many were forgotten
-- Cost     O(limit * prefills on a worker + log reservations). Writes. Safe to retry.
local load, reservations, expiry = KEYS[1], KEYS[2], KEYS[3]
local requests_prefix, prefills_prefix = KEYS[4], KEYS[5]
local limit, ttl_ms, grace_ms = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
-- @include clock
-- @include kinds
-- @include load
-- @include request
-- @include despite_full

despite_full(reservations)
local now = now_ms()
local latest = string.format('%d', now + ttl_ms)
for _, request_id in ipairs(
  redis.call('ZRANGEBYSCORE', expiry, latest, '+inf', 'LIMIT', 0, 8)) do
  redis.call('ZADD', expiry, latest, request_id)
end
local soon = string.format('%d', now + grace_ms)
for _, request_id in ipairs(redis.call('ZRANDMEMBER', expiry, 8)) do
  if redis.call('HEXISTS', reservations, request_id) == 0 then
    redis.call('ZADD', expiry, 'LT', soon, request_id)
  end
end
local picked = redis.call('HRANDFIELD', reservations, 8, 'WITHVALUES')
for i = 1, #picked, 2 do
  keep_kind(requests_prefix .. picked[i + 1], 'hash')
  keep_kind(prefills_prefix .. picked[i + 1], 'list')
  if redis.call('HEXISTS', requests_prefix .. picked[i + 1], picked[i]) == 0 then
    redis.call('HDEL', reservations, picked[i])
  end
end
return unreserve_expired(now, limit)
