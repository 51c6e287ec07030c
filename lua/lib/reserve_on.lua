-- reserve_on(l, inc, request_id, request, now, ends_ms): reserves on `inc`, whose load is `l`.
-- Wants locals: load, reservations, expiry, requests_prefix, prefills_prefix; and libs load, record,
-- changed.
local function reserve_on(l, inc, request_id, request, now, ends_ms)
  if request.state == 'd' then
    l.decoding = l.decoding + 1
  elseif request.state == 'p' then
    if l.requests == l.decoding then
      l.head_us, l.head_since_ms = request.prefill_us, now
    end
    l.prefill_tokens = l.prefill_tokens + request.prefill_tokens
    l.prefill_us = l.prefill_us + request.prefill_us
    redis.call('RPUSH', prefills_prefix .. inc, request_id)
  end
  l.blocks = l.blocks + request.blocks
  if request.state ~= 'h' then
    l.requests = l.requests + 1
  end
  l.total = l.total + 1
  redis.call('HSET', load, inc, format_load(l))
  changed(inc)
  redis.call('HSET', reservations, request_id, inc)
  redis.call('ZADD', expiry, string.format('%d', ends_ms), request_id)
  redis.call('HSET', requests_prefix .. inc, request_id, format_request(request))
end
