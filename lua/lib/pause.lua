-- is_paused(inc, now): whether the lease of `inc` must stay lapsed, as it failed requests. Never that
-- of the last worker.
-- Wants locals: leases, load; and lib failures.
local function is_paused(inc, now)
  local f = failures_of(inc, now)
  if not f or f.until_ms <= now then
    return false
  end
  local lapsed = redis.call('ZCOUNT', leases, '-inf', now)
  local itself = tonumber(redis.call('ZSCORE', leases, inc) or 0) > now and 1 or 0
  return redis.call('HLEN', load) - lapsed - itself > 0
end
