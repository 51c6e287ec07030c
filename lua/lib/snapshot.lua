-- snapshot(now): {now, live incs, load as field, value, ..., rounds}; what decisions are based on.
-- Wants locals: meta, leases, load; and lib number.
-- Of reservations made so far, in millionths.
local function rounds_so_far()
  return whole(redis.call('HGET', meta, 'rounds'), 1e15) or 0
end

local function snapshot(now)
  return {
    now,
    redis.call('ZRANGEBYSCORE', leases, string.format('(%d', now), '+inf'),
    redis.call('HGETALL', load),
    rounds_so_far(),
  }
end
