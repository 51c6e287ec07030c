-- What targets are yet to fetch of KV that their sources keep for a time: for the attempt of the request
-- that it is for, `<source> <target> <life of each engine> <leases that had ended at the source>`, and
-- until when it may begin. It is there until the target is known to have fetched by then; what was not,
-- until an answer shows that nothing came too late, or for long.
-- late_fetches(by): attempts that may begin to fetch late by then, with the times, and those
-- records.
-- Wants locals: fetches, fetching.
local MOST_FETCHES = 4000

local function late_fetches(by)
  local late = redis.call('ZRANGEBYSCORE', fetches, '-inf', string.format('%d', by), 'WITHSCORES',
    'LIMIT', 0, MOST_FETCHES)
  local attempts = {}
  for i = 1, #late, 2 do
    attempts[#attempts + 1] = late[i]
  end
  return late, #attempts > 0 and redis.call('HMGET', fetching, unpack(attempts)) or {}
end
