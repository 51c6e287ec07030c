-- serving(worker): the incarnation that is routed to as `worker`; nil if there is none, or if the
-- one recorded there is retired or another worker's.
-- predecessor(worker, previous): the incarnation that is serving, else `previous` if it is of this worker.
-- is_alive(inc, now): whether it has a lease.
-- is_replaced(worker, previous, nonce, now): whether a live process other than that of `nonce`, which
-- acted as `previous`, has taken over the worker. One for which routers vouch is not heard of.
-- Wants locals: current, leases; and libs writer, info, verdict.
local function serving(worker)
  local inc = redis.call('HGET', current, worker)
  if inc and writer_of(inc) and (info_of(inc).worker or worker) == worker then
    return inc
  end
end

local function predecessor(worker, previous)
  return serving(worker) or (info_of(previous).worker == worker and previous or nil)
end

local function is_alive(inc, now)
  local expiry_ms = inc and redis.call('ZSCORE', leases, inc)
  return expiry_ms and tonumber(expiry_ms) > now
end

-- An incarnation whose worker is unknown may be another worker's, put there by hand. If it is this
-- worker's after all, its process restores that with its next heartbeat, and is refused itself.
local function is_replaced(worker, previous, nonce, now)
  local other = serving(worker)
  return other and other ~= previous and info_of(other).worker == worker
    and writer_of(other) ~= nonce and is_alive(other, now) and not marks_of(worker, now).away
end
