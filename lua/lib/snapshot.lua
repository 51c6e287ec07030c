-- snapshot(now): {now, live incs, load as field, value, ...}; what a decision is made from.
-- Wants locals: leases, load.
local function snapshot(now)
  return {
    now,
    redis.call('ZRANGEBYSCORE', leases, string.format('(%d', now), '+inf'),
    redis.call('HGETALL', load),
  }
end
