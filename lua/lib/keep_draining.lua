-- keep_draining(worker, says_so, now): whether a worker is out of service, whose agent says so or does
-- not: it was told when it last renewed, and outlives a loss of data.
-- Wants locals: failures.
local function keep_draining(worker, says_so, now)
  local mark = redis.call('HGET', failures, worker)
  if mark == 'undone' then
    redis.call('HDEL', failures, worker)
    return false
  elseif not mark and says_so then
    redis.call('HSET', failures, worker, string.format('draining %d', now))
    return true
  end
  return string.find(mark or '', '^draining') ~= nil
end
