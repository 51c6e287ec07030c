-- Fetches that targets are yet to make, of KV that their sources keep for a time: by attempt of the
-- request, `<source> <target> <life of each engine> <leases that had ended at the source>`, and until
-- when the fetch may begin. A fetch is kept until the target is known to have made it in time; else
-- until an answer shows that nothing came too late, or for long.
-- late_fetches(by): returns attempts whose fetch may begin late by then, with the times, and the
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
