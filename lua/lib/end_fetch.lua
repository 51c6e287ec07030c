-- forget_fetch(attempt): forgets an attempt's fetch (lib/fetches), whose KV is right.
-- end_fetch(attempt, now): forgets it if it was made in time, as it is made by now.
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
