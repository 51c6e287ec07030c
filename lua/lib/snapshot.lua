-- snapshot(now): {now, live incs, load as field, value, ...}; what decisions are based on.
-- Wants locals: leases, load.
local function snapshot(now)
  return {
    now,
    redis.call('ZRANGEBYSCORE', leases, string.format('(%d', now), '+inf'),
    redis.call('HGETALL', load),
  }
end
