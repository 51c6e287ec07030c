-- failures_of(inc, now): how many requests a worker failed, less those that it answered since, up to 7,
-- and when it failed the last one, ms; 0 and 0 if there were none.
-- Wants locals: failures; and lib number.
local function failures_of(inc, now)
  local count, last_ms = string.match(redis.call('HGET', failures, inc) or '', '^(%d+) (%d+)$')
  count, last_ms = whole(count, 7), whole(last_ms, now)
  if count and last_ms then
    return count, last_ms
  end
  return 0, 0
end
