-- retire(inc): from now on nothing routes to, writes as or reserves on `inc`; its blocks are left
-- to the sweep. Bounded by the requests a worker may hold.
-- Wants locals: leases, applied, load, dead, reservations, expiry, requests_prefix,
-- prefills_prefix.
local function retire(inc)
  redis.call('ZREM', leases, inc)
  redis.call('HDEL', applied, inc)
  redis.call('HDEL', load, inc)
  redis.call('SADD', dead, inc)
  for _, request_id in ipairs(redis.call('HKEYS', requests_prefix .. inc)) do
    redis.call('HDEL', reservations, request_id)
    redis.call('ZREM', expiry, request_id)
  end
  redis.call('DEL', requests_prefix .. inc, prefills_prefix .. inc)
end
