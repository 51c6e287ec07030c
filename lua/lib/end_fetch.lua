-- forget_fetch(attempt): what it was to fetch, see lib/fetches, is right.
-- end_fetch(attempt, now): it has fetched by now, if that was in time.
-- Wants locals: fetches, fetching.
local function forget_fetch(attempt)
  redis.call('ZREM', fetches, attempt)
  redis.call('HDEL', fetching, attempt)
end

local function end_fetch(attempt, now)
  local until_ms = redis.call('ZSCORE', fetches, attempt)
  if until_ms and now < tonumber(until_ms) then
    forget_fetch(attempt)
  end
end
