-- recount(inc, now): the load of `inc` from its requests, forgetting those that are not whole.
-- Wants locals: load, reservations, expiry, requests_prefix, prefills_prefix; and libs load,
-- request.
local function recount(inc, now)
  local counted = {tokens = 0, us = 0, head_us = 0, head_since_ms = 0, blocks = 0, requests = 0,
    decoding = 0, total = 0}
  local last = parse_load(redis.call('HGET', load, inc))
  counted.total = last and last.total or 0
  local queue, prefilling = redis.call('LRANGE', prefills_prefix .. inc, 0, -1), {}
  local entries = redis.call('HGETALL', requests_prefix .. inc)
  for i = 1, #entries, 2 do
    local id, request = entries[i], parse_request(entries[i + 1])
    local is_whole = request and redis.call('HGET', reservations, id) == inc
      and redis.call('ZSCORE', expiry, id)
    if is_whole then
      counted.requests = counted.requests + 1
      counted.blocks = counted.blocks + request.blocks
      if request.state == 'p' then
        counted.tokens = counted.tokens + request.tokens
        counted.us = counted.us + request.us
        prefilling[id] = request
        queue[#queue + 1] = id
      else
        counted.decoding = counted.decoding + 1
      end
    else
      redis.call('HDEL', requests_prefix .. inc, id)
      redis.call('HDEL', reservations, id)
      redis.call('ZREM', expiry, id)
    end
  end
  redis.call('DEL', prefills_prefix .. inc)
  for _, id in ipairs(queue) do
    if prefilling[id] then
      if counted.head_us == 0 then
        counted.head_us, counted.head_since_ms = prefilling[id].us, now
      end
      redis.call('RPUSH', prefills_prefix .. inc, id)
      prefilling[id] = nil
    end
  end
  if last and last.head_us == counted.head_us then
    counted.head_since_ms = last.head_since_ms
  end
  redis.call('HSET', load, inc, format_load(counted))
end
