-- A reservation's record. A corrupted record counts for nothing: the worker's heartbeat finds out, and
-- recounts its load.
-- began_ms_of(attempt): when that try began, by the Redis clock; 0 if the attempt does not say.
-- record_of(key, inc): nil if there is no such reservation, or its record cannot be read.
-- Wants locals: reservations, requests_prefix.
local function parse_request(text)
  local tokens, us, blocks, state, attempt = string.match(text or '',
    '^(%d+) (%d+) (%d+) ([pd]) (%S+)$')
  tokens, us, blocks = tonumber(tokens), tonumber(us), tonumber(blocks)
  return tokens and math.max(tokens, us, blocks) < 1e12 and {
    tokens = tokens, us = us, blocks = blocks, state = state, attempt = attempt,
  }
end

local function format_request(r)
  return string.format('%d %d %d %s %s', r.tokens, r.us, r.blocks, r.state, r.attempt)
end

local function began_ms_of(attempt)
  return tonumber(string.match(attempt or '', '^(%d+)%-')) or 0
end

local function record_of(key, inc)
  inc = inc or redis.call('HGET', reservations, key)
  return inc and parse_request(redis.call('HGET', requests_prefix .. inc, key)) or nil
end
