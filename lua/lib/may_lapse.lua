-- may_lapse(inc, now): whether a worker may be out of service, or stay so: no more than half of all
-- workers, or one, are, and never the last, nor the last of a role. Those that drain are none of them.
-- Incarnations that are not routed to yet have leases too, but nothing in `load`.
-- Wants locals: leases, load; and libs info, verdict.
-- Whether this worker alone has its role among live ones.
local function is_last_of_role(inc, now)
  local role = info_of(inc).role
  if role ~= 'prefill' and role ~= 'decode' then
    return false
  end
  for _, other in ipairs(redis.call('ZRANGEBYSCORE', leases, string.format('(%d', now), '+inf')) do
    if other ~= inc and info_of(other).role == role and redis.call('HEXISTS', load, other) == 1 then
      return false
    end
  end
  return true
end

local function may_lapse(inc, now)
  local all = redis.call('HLEN', load)
  local lapsed = redis.call('ZCOUNT', leases, '-inf', now)
  for _, drains in ipairs(out_of_service(now)) do
    if redis.call('HEXISTS', load, drains) == 1 then
      all, lapsed = all - 1, lapsed - 1
    end
  end
  if tonumber(redis.call('ZSCORE', leases, inc) or now + 1) <= now then
    lapsed = lapsed - 1 -- itself
  end
  return all - lapsed >= 2 and lapsed < math.max(1, math.floor(all / 2))
    and not is_last_of_role(inc, now)
end
