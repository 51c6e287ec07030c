-- recount(inc, now): rebuilds the load of `inc` and the queue of its prefills from its requests. A
-- request of which Redis has lost the record, the reservation or the expiry is forgotten, and so is
-- what is promised as the source of a request that is. Writes only what differs. Bounded by the
-- requests of a worker; by all reservations, if some of them have lost their expiry.
-- Wants locals: load, reservations, expiry, requests_prefix, prefills_prefix; and libs load, record,
-- changed.
local COUNTED = {'prefill_tokens', 'prefill_us', 'head_us', 'head_since_ms', 'blocks', 'requests',
  'decoding'} -- the rest of a load is history

local function forget(inc, request_id, owner)
  redis.call('HDEL', requests_prefix .. inc, request_id)
  if owner == inc or not owner then
    redis.call('HDEL', reservations, request_id)
    redis.call('ZREM', expiry, request_id)
  end
end

-- The requests of `inc` that are in flight, by id.
local function in_flight(inc)
  local found = {}
  local ids = redis.call('HKEYS', requests_prefix .. inc)
  local records = redis.call('HVALS', requests_prefix .. inc)
  for from = 1, #ids, 1000 do
    local some = {unpack(ids, from, math.min(from + 999, #ids))}
    local owners = redis.call('HMGET', reservations, unpack(some))
    local expiries = redis.call('ZMSCORE', expiry, unpack(some))
    for i, id in ipairs(some) do
      local request = parse_request(records[from + i - 1])
      local target = target_of(id)
      local is_orphan = target and request and not is_leased(request)
        and redis.call('HEXISTS', reservations, target) == 0
      if request and owners[i] == inc and expiries[i] and not is_orphan then
        found[id] = request
      else
        forget(inc, id, owners[i])
      end
    end
  end
  return found
end

-- Forgets reservations that have neither an expiry nor a record: nothing else would ever end them.
local function forget_orphans()
  if redis.call('HLEN', reservations) <= redis.call('ZCARD', expiry) then
    return
  end
  local cursor = '0'
  repeat
    local page = redis.call('HSCAN', reservations, cursor, 'COUNT', 500)
    cursor = page[1]
    for i = 1, #page[2], 2 do
      local id, owner = page[2][i], page[2][i + 1]
      if not redis.call('ZSCORE', expiry, id)
        and redis.call('HEXISTS', requests_prefix .. owner, id) == 0 then
        redis.call('HDEL', reservations, id)
      end
    end
  until cursor == '0'
end

-- The ids in the queue that still prefill, in order; then those that the queue lacks.
local function in_order(queue, requests)
  local ordered, placed = {}, {}
  for _, id in ipairs(queue) do
    if requests[id] and requests[id].state == 'p' and not placed[id] then
      ordered[#ordered + 1], placed[id] = id, true
    end
  end
  for id, request in pairs(requests) do
    if request.state == 'p' and not placed[id] then
      ordered[#ordered + 1] = id
    end
  end
  return ordered
end

local function recount(inc, now)
  forget_orphans()
  local requests = in_flight(inc)
  local queue = redis.call('LRANGE', prefills_prefix .. inc, 0, -1)
  local ordered = in_order(queue, requests)
  if table.concat(ordered, '\0') ~= table.concat(queue, '\0') then
    redis.call('DEL', prefills_prefix .. inc)
    for _, id in ipairs(ordered) do
      redis.call('RPUSH', prefills_prefix .. inc, id)
    end
  end

  local text = redis.call('HGET', load, inc)
  local counted = parse_load(text) or no_load()
  local last_head_us, last_since_ms = counted.head_us, counted.head_since_ms
  for _, name in ipairs(COUNTED) do
    counted[name] = 0
  end
  for _, request in pairs(requests) do
    counted.blocks = counted.blocks + request.blocks
    if request.state ~= 'h' then
      counted.requests = counted.requests + 1
    end
    if request.state == 'p' then
      counted.prefill_tokens = counted.prefill_tokens + request.prefill_tokens
      counted.prefill_us = counted.prefill_us + request.prefill_us
    elseif request.state == 'd' then
      counted.decoding = counted.decoding + 1
    end
  end
  if #ordered > 0 then
    counted.head_us, counted.head_since_ms = requests[ordered[1]].prefill_us, now
  end
  if last_head_us == counted.head_us then
    counted.head_since_ms = math.min(last_since_ms, now)
  end
  if format_load(counted) ~= text then
    redis.call('HSET', load, inc, format_load(counted))
    changed(inc)
  end
end
