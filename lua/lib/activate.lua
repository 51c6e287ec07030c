-- activate(worker, inc, heir): routes `worker` to `inc` and retires the incarnation before it.
-- heir: `inc` is the same process under a new number, and takes over the requests in flight.
-- Wants locals: current, load, reservations, requests_prefix, prefills_prefix; and lib retire.
local function activate(worker, inc, heir)
  local old = redis.call('HGET', current, worker)
  local old_load = old and redis.call('HGET', load, old)
  if heir and old_load then
    for _, request_id in ipairs(redis.call('HKEYS', requests_prefix .. old)) do
      redis.call('HSET', reservations, request_id, inc)
    end
    for _, prefix in ipairs({requests_prefix, prefills_prefix}) do
      if redis.call('EXISTS', prefix .. old) == 1 then
        redis.call('RENAME', prefix .. old, prefix .. inc)
      end
    end
    redis.call('HSET', load, inc, old_load)
  else
    redis.call('HSET', load, inc, '0 0 0 0 0 0 0 0')
  end
  if old then
    retire(old)
  end
  redis.call('HSET', current, worker, inc)
end
