-- retire(inc): from now on nothing routes to or reserves on `inc`; its blocks are left to the
-- sweep. Returns how many requests were on it. Bounded by the requests a worker may hold.
-- Wants locals: workers, leases, writers, load, reservations, expiry, requests_prefix,
-- prefills_prefix; and lib kinds.
local function retire(inc)
  redis.call('ZREM', leases, inc)
  redis.call('HDEL', workers, inc)
  redis.call('HDEL', writers, inc)
  redis.call('HDEL', load, inc)
  keep_kind(requests_prefix .. inc, 'hash')
  local request_ids = redis.call('HKEYS', requests_prefix .. inc)
  for _, request_id in ipairs(request_ids) do
    if redis.call('HGET', reservations, request_id) == inc then
      redis.call('HDEL', reservations, request_id)
      redis.call('ZREM', expiry, request_id)
    end
  end
  redis.call('DEL', requests_prefix .. inc, prefills_prefix .. inc)
  return #request_ids
end
