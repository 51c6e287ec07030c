-- For how long a worker that failed requests gets none. The first failure costs it only the time until
-- it renews its lease; each further one twice as much as the one before, up to a minute.
-- pause_ends_ms(count, last_ms): when requests may go there again; see failures_of.
-- is_paused(inc, now): whether the lease of `inc` must stay lapsed. Never that of the last worker.
-- Wants locals: leases, load; and lib failures.
local function pause_ends_ms(count, last_ms)
  return last_ms + (count > 1 and math.min(500 * 2 ^ count, 60000) or 0)
end

local function is_paused(inc, now)
  if pause_ends_ms(failures_of(inc, now)) <= now then
    return false
  end
  local lapsed = redis.call('ZCOUNT', leases, '-inf', now)
  local itself = tonumber(redis.call('ZSCORE', leases, inc) or 0) > now and 1 or 0
  return redis.call('HLEN', load) - lapsed - itself > 0
end
