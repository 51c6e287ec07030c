-- retire(inc, worker, now): from now on nothing routes to `inc`, which was of `worker`, or reserves on
-- it; its blocks are left to the sweep. Returns how many requests were on it. Bounded by the
-- requests a worker may hold. What must outlive the worker of its marks is kept for a day.
-- What the sources of its requests have promised to them is given back, too.
-- Wants locals: workers, current, leases, writers, load, reservations, expiry, requests_prefix,
-- prefills_prefix, verdicts, versions; and libs record, request, verdict,
-- keep_verdict.
local KEPT_MS = 24 * 3600 * 1000

local function retire(inc, worker, now)
  if worker and redis.call('HGET', current, worker) == inc then
    redis.call('HDEL', current, worker)
    local marks = marks_of(worker, now)
    local lasts = marks.tainted or marks.draining
    keep_marks(worker, {
      tainted = marks.tainted, draining = marks.draining, gone = lasts and {since_ms = now},
    }, now)
    for _, other in ipairs(redis.call('HKEYS', verdicts)) do
      local gone = marks_of(other, now).gone
      if gone and now - gone.since_ms > KEPT_MS then
        redis.call('HDEL', verdicts, other)
      end
    end
  end
  redis.call('ZREM', leases, inc)
  redis.call('HDEL', workers, inc)
  redis.call('HDEL', writers, inc)
  redis.call('HDEL', load, inc)
  redis.call('ZREM', versions, inc)
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
