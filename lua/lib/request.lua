-- A reservation's record, and taking a reservation back. A corrupted record counts for nothing: the
-- worker's heartbeat finds out, and recounts its load.
-- Wants locals: load, reservations, expiry, requests_prefix, prefills_prefix; and lib load.
local function parse_request(text)
  local tokens, us, blocks, state, attempt = string.match(text or '',
    '^(%d+) (%d+) (%d+) ([pd]) (%S+)$')
  tokens, us, blocks = tonumber(tokens), tonumber(us), tonumber(blocks)
  return tokens and math.max(tokens, us, blocks) < 1e12 and {
    tokens = tokens, us = us, blocks = blocks, state = state, attempt = attempt,
  }
end

-- When the try that made a reservation began, ms by the Redis clock; 0 if its attempt does not say.
local function began_ms_of(attempt)
  return tonumber(string.match(attempt or '', '^(%d+)%-')) or 0
end

-- The record of a reservation; nil if there is none, or it cannot be read.
local function record_of(request_id)
  local inc = redis.call('HGET', reservations, request_id)
  return inc and parse_request(redis.call('HGET', requests_prefix .. inc, request_id)) or nil
end

local function format_request(r)
  return string.format('%d %d %d %s %s', r.tokens, r.us, r.blocks, r.state, r.attempt)
end

-- Takes a request's prefill out of `l`, its worker's load; the next one in line becomes the head.
local function end_prefill(l, inc, request_id, request, now)
  local prefills = prefills_prefix .. inc
  l.tokens = l.tokens - request.tokens
  l.us = l.us - request.us
  local was_head = redis.call('LINDEX', prefills, 0) == request_id
  redis.call('LREM', prefills, 1, request_id)
  if was_head then
    local head = redis.call('LINDEX', prefills, 0)
    l.head_us = 0
    local next_request = head and parse_request(redis.call('HGET', requests_prefix .. inc, head))
    if next_request then
      l.head_us = next_request.us
    end
    l.head_since_ms = now
  end
end

-- Forgets a reservation and gives back what it held. False if there is none. If only its expiry was
-- left, that is removed, and the worker's heartbeat drops the rest.
local function unreserve(request_id, now)
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
    return true
  end
  if request.state == 'p' then
    end_prefill(l, inc, request_id, request, now)
  else
    l.decoding = l.decoding - 1
  end
  l.blocks = l.blocks - request.blocks
  l.requests = l.requests - 1
  redis.call('HSET', load, inc, format_load(l))
  return true
end

-- Forgets up to `limit` reservations past their expiry. Returns how many.
local function unreserve_expired(now, limit)
  local expired = redis.call('ZRANGEBYSCORE', expiry, '-inf', now, 'LIMIT', 0, limit)
  for _, request_id in ipairs(expired) do
    unreserve(request_id, now)
  end
  return #expired
end
