-- activate(worker, inc, heir, now): routes `worker` to `inc` and retires the one before it.
-- heir: `inc` is the same process under a new number, and takes over the requests in flight.
-- Wants locals: current, load, reservations, requests_prefix, prefills_prefix; and libs retire,
-- recount.
local function activate(worker, inc, heir, now)
  local old = redis.call('HGET', current, worker)
  if heir and old then
    for _, request_id in ipairs(redis.call('HKEYS', requests_prefix .. old)) do
      redis.call('HSET', reservations, request_id, inc)
    end
    for _, prefix in ipairs({requests_prefix, prefills_prefix}) do
      if redis.call('EXISTS', prefix .. old) == 1 then
        redis.call('RENAME', prefix .. old, prefix .. inc)
      end
    end
    redis.call('HSET', load, inc, redis.call('HGET', load, old) or '')
  end
  recount(inc, now)
  if old then
    retire(old)
  end
  redis.call('HSET', current, worker, inc)
end
