-- The line of requests that wait. A flow is due when the tag of its first ticket is the least of all:
-- self-clocked fair queueing (Golestani 1994), of flows that weigh what their charges are divided by.
-- charge_of(ticket): what a turn costs its flow; 0 if that cannot be read.
-- virtual_time(): the tag of the last turn.
-- set_tag(flow, start): the tag of its first ticket; without one the flow is over.
-- take_out(flow, ticket, had_turn): the ticket waits no more; only a turn is charged.
-- drop_if_empty(): once nobody waits, nobody owes anything.
-- Wants locals: line, flows, waiting_prefix; and lib number.
local function charge_of(ticket)
  return whole(string.match(ticket or '', '^%S+ (%d+) [x-]$'), 1e12) or 0
end

local function virtual_time()
  return whole(redis.call('HGET', line, 'tag'), 1e15) or 0
end

local function set_tag(flow, start)
  local first = redis.call('ZRANGE', waiting_prefix .. flow, 0, 0)[1]
  if first then
    redis.call('ZADD', flows, string.format('%.0f', start + charge_of(first)), flow)
  else
    redis.call('ZREM', flows, flow)
  end
end

local function take_out(flow, ticket, had_turn)
  local tickets = waiting_prefix .. flow
  local first = redis.call('ZRANGE', tickets, 0, 0)[1]
  local tag = tonumber(redis.call('ZSCORE', flows, flow) or virtual_time() + charge_of(first))
  if redis.call('ZREM', tickets, ticket) == 0 then
    return
  end
  local start = tag - charge_of(first)
  if had_turn then
    start = start + charge_of(ticket)
    redis.call('HSET', line, 'tag', string.format('%.0f', math.max(start, virtual_time())))
  end
  set_tag(flow, start)
end

local function drop_if_empty()
  if redis.call('EXISTS', flows) == 0 then
    redis.call('DEL', line)
  end
end
