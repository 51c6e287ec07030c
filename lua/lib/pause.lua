-- is_paused(inc, failed, now): whether the lease of `inc` must stay lapsed, as it failed requests; false
-- for the last worker. failed: its mark; nil: none.
-- Wants locals: leases, load.
local function is_paused(inc, failed, now)
  if not failed or failed.until_ms <= now then
    return false
  end
  local lapsed = redis.call('ZCOUNT', leases, '-inf', now)
  local itself = tonumber(redis.call('ZSCORE', leases, inc) or 0) > now and 1 or 0
  return redis.call('HLEN', load) - lapsed - itself > 0
end
