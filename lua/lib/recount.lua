-- recount(inc, now): rebuilds the load of `inc` and the queue of its prefills from its requests. A
-- request stays while its record can be read and one of its other two traces, the reservation or
-- the expiry, is intact; the other one is restored. Bounded by the requests of a worker.
-- Wants locals: load, reservations, expiry, requests_prefix, prefills_prefix; and libs load, request.
local function is_in_flight(inc, request_id, owner, expires)
  if owner == inc and expires then
    return true
  end
  if owner ~= inc and (not expires
    or owner and redis.call('HEXISTS', requests_prefix .. owner, request_id) == 1) then
    return false
  end
  redis.call('HSET', reservations, request_id, inc)
  -- Routers, which know how long a reservation may last, lower it.
  redis.call('ZADD', expiry, '+inf', request_id)
  return true
end

-- Reservation and expiry of each request; false where it has none.
local function traces(ids)
  local owners, expiries = {}, {}
  for from = 1, #ids, 1000 do
    local some = {unpack(ids, from, math.min(from + 999, #ids))}
    for i, owner in ipairs(redis.call('HMGET', reservations, unpack(some))) do
      owners[from + i - 1] = owner
    end
    for i, expires in ipairs(redis.call('ZMSCORE', expiry, unpack(some))) do
      expiries[from + i - 1] = expires
    end
  end
  return owners, expiries
end

local function forget(inc, request_id)
  redis.call('HDEL', requests_prefix .. inc, request_id)
  if redis.call('HGET', reservations, request_id) == inc then
    redis.call('HDEL', reservations, request_id)
    redis.call('ZREM', expiry, request_id)
  end
end

-- The ids in `prefilling`, those in the queue first.
local function in_order(queue, prefilling)
  local ordered, placed = {}, {}
  for _, id in ipairs(queue) do
    if prefilling[id] and not placed[id] then
      ordered[#ordered + 1], placed[id] = id, true
    end
  end
  for id in pairs(prefilling) do
    if not placed[id] then
      ordered[#ordered + 1] = id
    end
  end
  return ordered
end

local function equal(some, others)
  for i = 1, math.max(#some, #others) do
    if some[i] ~= others[i] then
      return false
    end
  end
  return true
end

local function recount(inc, now)
  local counted = {tokens = 0, us = 0, head_us = 0, head_since_ms = 0, blocks = 0, requests = 0,
    decoding = 0, total = 0}
  local prefilling = {}
  local ids = redis.call('HKEYS', requests_prefix .. inc)
  local records = redis.call('HVALS', requests_prefix .. inc)
  local owners, expiries = traces(ids)
  for i, id in ipairs(ids) do
    local request = parse_request(records[i])
    if request and is_in_flight(inc, id, owners[i], expiries[i]) then
      counted.requests = counted.requests + 1
      counted.blocks = counted.blocks + request.blocks
      if request.state == 'p' then
        counted.tokens = counted.tokens + request.tokens
        counted.us = counted.us + request.us
        prefilling[id] = request
      else
        counted.decoding = counted.decoding + 1
      end
    else
      forget(inc, id)
    end
  end

  local queue = redis.call('LRANGE', prefills_prefix .. inc, 0, -1)
  local ordered = in_order(queue, prefilling)
  if not equal(ordered, queue) then
    redis.call('DEL', prefills_prefix .. inc)
    for _, id in ipairs(ordered) do
      redis.call('RPUSH', prefills_prefix .. inc, id)
    end
  end

  local text = redis.call('HGET', load, inc)
  local last = parse_load(text)
  if #ordered > 0 then
    counted.head_us, counted.head_since_ms = prefilling[ordered[1]].us, now
  end
  if last then
    counted.total = last.total
    if last.head_us == counted.head_us then
      counted.head_since_ms = math.min(last.head_since_ms, now)
    end
  end
  if format_load(counted) ~= text then
    redis.call('HSET', load, inc, format_load(counted))
  end
end
