-- A reservation's record, and which reservation an id names. A corrupted record counts for nothing:
-- the worker's heartbeat finds out, and recounts its load.
-- began_ms_of(attempt): returns when a try began, by the Redis clock; 0 if the attempt does not say.
-- source_of(key): returns the key of the reservation on the worker that computes or holds the prompt
-- for this one. No request id has a space.
-- target_of(key): returns the key whose source this is; nil if it is no source's.
-- is_leased(source): whether a source's blocks are computed, and kept until a lease ends.
-- tag_of(attempt): returns what tells a try from others; nil if the attempt does not say.
-- record_of(key, inc): nil if there is no such reservation, or its record cannot be read.
-- find(id): the key of the reservation that callers know as `<request_id>~<tag>`, its record and its
-- inc. The key is just the request id, unless another request had that. Also takes the key itself.
-- If there is no such reservation, only the key that it would get.
-- Wants locals: reservations, requests_prefix.
local function parse_request(text)
  local tokens, us, blocks, state, attempt, source = string.match(text or '',
    '^(%d+) (%d+) (%d+) ([pdh]) (%S+)( ?s?)$')
  tokens, us, blocks = tonumber(tokens), tonumber(us), tonumber(blocks)
  return tokens and math.max(tokens, us, blocks) < 1e12 and {
    prefill_tokens = tokens, prefill_us = us, blocks = blocks, state = state, attempt = attempt,
    has_source = source == ' s',
  }
end

local function format_request(r)
  return string.format('%d %d %d %s %s%s', r.prefill_tokens, r.prefill_us, r.blocks, r.state, r.attempt,
    r.has_source and ' s' or '')
end

local function source_of(key)
  return key .. ' source'
end

local function target_of(key)
  return string.match(key, '^(.+) source$')
end

local function began_ms_of(attempt)
  return tonumber(string.match(attempt or '', '^(%d+)%-')) or 0
end

local function is_leased(source)
  return source.state == 'h' and source.prefill_tokens > 0
end

local function tag_of(attempt)
  return string.match(attempt or '', '^%d+%-(%x+)')
end

local function record_of(key, inc)
  inc = inc or redis.call('HGET', reservations, key)
  return inc and parse_request(redis.call('HGET', requests_prefix .. inc, key)) or nil
end

local function find(id)
  local request_id, tag = string.match(id, '^(.+)~(%x+)$')
  local incs = redis.call('HMGET', reservations, id, request_id or id)
  if incs[1] then
    return id, record_of(id, incs[1]), incs[1]
  end
  if not incs[2] then
    return request_id or id
  end
  local record = record_of(request_id, incs[2])
  if record and tag_of(record.attempt) == tag then
    return request_id, record, incs[2]
  end
  return id
end
