-- lease_renew: extend an incarnation's lease. One that lapsed is revived, unless the sweep has
-- retired it: its worker is there, and has only missed a renewal.
--
-- KEYS[1] leases   zset   inc -> expiry, ms, Redis clock
-- KEYS[2] applied  hash   inc -> "<seq> <nonce>"
-- ARGV[1] inc      int
-- ARGV[2] nonce    str    as registered
-- ARGV[3] ttl_ms   int    > 0
-- Returns  1
--          0              retired or unknown: the worker must register again
-- Cost     O(log workers). Writes. Safe to retry.
local leases, applied = KEYS[1], KEYS[2]
local inc, nonce, ttl_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
-- @include clock
-- @include writer

local now = now_ms()
if not redis.call('ZSCORE', leases, inc) or writer_of(inc) ~= nonce then
  return 0
end
redis.call('ZADD', leases, string.format('%d', now + ttl_ms), inc)
return 1
