-- Taking a reservation back.
-- Wants locals: load, reservations, expiry, requests_prefix, prefills_prefix; and libs load, record,
-- changed.
-- Takes a request's prefill out of `l`, its worker's load; the next one in line becomes the head.
local function end_prefill(l, inc, request_id, request, now)
  local prefills = prefills_prefix .. inc
  l.prefill_tokens = l.prefill_tokens - request.prefill_tokens
  l.prefill_us = l.prefill_us - request.prefill_us
  local was_head = redis.call('LINDEX', prefills, 0) == request_id
  redis.call('LREM', prefills, 1, request_id)
  if was_head then
    local head = redis.call('LINDEX', prefills, 0)
    l.head_us = 0
    local next_request = head and parse_request(redis.call('HGET', requests_prefix .. inc, head))
    if next_request then
      l.head_us = next_request.prefill_us
    end
    l.head_since_ms = now
  end
end

-- Forgets a reservation and gives back what it held. False if there is none. If only its expiry was
-- left, that is removed, and the worker's heartbeat drops the rest.
local function unreserve_one(request_id, now)
  local inc = redis.call('HGET', reservations, request_id)
  if not inc and not redis.call('ZSCORE', expiry, request_id) then
    return false
  end
  redis.call('HDEL', reservations, request_id)
  redis.call('ZREM', expiry, request_id)
  if not inc then
    return true
  end
  local request = parse_request(redis.call('HGET', requests_prefix .. inc, request_id))
  redis.call('HDEL', requests_prefix .. inc, request_id)
  local l = parse_load(redis.call('HGET', load, inc))
  if not request or not l then
    return true, request
  end
  if request.state == 'p' then
    end_prefill(l, inc, request_id, request, now)
  elseif request.state == 'd' then
    l.decoding = l.decoding - 1
  end
  l.blocks = l.blocks - request.blocks
  if request.state ~= 'h' then
    l.requests = l.requests - 1
  end
  redis.call('HSET', load, inc, format_load(l))
  changed(inc)
  return true, request
end

-- Gives back what a request's source has promised to it. What that has computed and not yet handed on
-- it keeps until its lease ends, whatever becomes of the request.
local function unreserve_source(request_id, now)
  local source = record_of(source_of(request_id))
  if not source or not is_leased(source) then
    unreserve_one(source_of(request_id), now)
  end
end

-- Both of a request and its source.
local function unreserve(request_id, now)
  local had_one, request = unreserve_one(request_id, now)
  if request and request.has_source then
    unreserve_source(request_id, now)
  end
  return had_one
end

-- Forgets up to `limit` reservations past their expiry. Returns how many.
local function unreserve_expired(now, limit)
  local expired = redis.call('ZRANGEBYSCORE', expiry, '-inf', now, 'LIMIT', 0, limit)
  for _, request_id in ipairs(expired) do
    unreserve(request_id, now)
  end
  return #expired
end
