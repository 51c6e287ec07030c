-- serving(worker): the incarnation that is routed to as `worker`; nil if there is none, or if the
-- one recorded there is retired or another worker's.
-- predecessor(worker, held): the incarnation that is serving, else `held` if it is of this worker.
-- is_replaced(worker, held, nonce, now): whether a live process other than that of `nonce`, which
-- acted as `held`, has taken over the worker.
-- Wants locals: workers, current, leases; and lib writer.
local function worker_of(inc)
  local readable, info = pcall(cjson.decode, redis.call('HGET', workers, inc))
  return readable and type(info) == 'table' and info.worker or nil
end

local function serving(worker)
  local inc = redis.call('HGET', current, worker)
  if inc and writer_of(inc) and (worker_of(inc) or worker) == worker then
    return inc
  end
end

local function predecessor(worker, held)
  return serving(worker) or (worker_of(held) == worker and held or nil)
end

local function is_alive(inc, now)
  local expiry_ms = inc and redis.call('ZSCORE', leases, inc)
  return expiry_ms and tonumber(expiry_ms) > now
end

-- An incarnation whose worker is unknown may be another worker's, put there by hand. If it is this
-- worker's after all, its process restores that with its next heartbeat, and is refused itself.
local function is_replaced(worker, held, nonce, now)
  local other = serving(worker)
  return other and other ~= held and worker_of(other) == worker and writer_of(other) ~= nonce
    and is_alive(other, now)
end
