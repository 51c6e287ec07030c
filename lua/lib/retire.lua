-- retire(inc, worker, now): from now on nothing routes to `inc`, which was of `worker`, or reserves on
-- it; its blocks are left to the sweep. Returns how many requests were on it. Bounded by the
-- requests a worker may hold.
-- What the sources of its requests have promised to them is given back, too.
-- Wants locals: workers, current, leases, writers, load, reservations, expiry, requests_prefix,
-- prefills_prefix, failures, versions; and libs record, request.
local function retire(inc, worker, now)
  if worker and redis.call('HGET', current, worker) == inc then
    redis.call('HDEL', current, worker)
  end
  redis.call('ZREM', leases, inc)
  redis.call('HDEL', workers, inc)
  redis.call('HDEL', writers, inc)
  redis.call('HDEL', load, inc)
  redis.call('ZREM', versions, inc)
  redis.call('HDEL', failures, 'away:' .. inc)
  for _, name in ipairs(redis.call('HKEYS', failures)) do
    if name == inc or string.find(name, inc .. ' ', 1, true) == 1 then
      redis.call('HDEL', failures, name)
    end
  end
  local request_ids = redis.call('HKEYS', requests_prefix .. inc)
  for _, request_id in ipairs(request_ids) do
    if redis.call('HGET', reservations, request_id) == inc then
      local request = record_of(request_id, inc)
      if request and request.has_source then
        unreserve_source(request_id, now)
      end
      redis.call('HDEL', reservations, request_id)
      redis.call('ZREM', expiry, request_id)
    end
  end
  redis.call('DEL', requests_prefix .. inc, prefills_prefix .. inc)
  return #request_ids
end
