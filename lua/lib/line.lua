-- The line of waiting requests. A flow is due when its first ticket has the lowest tag of all:
-- self-clocked fair queueing (Golestani 1994). A flow's weight is what its charges are divided by.
-- Tickets that every worker could take are easy, the others picky; the two are kept apart.
-- charge_of(ticket): what a turn costs its flow; 0 if that cannot be read.
-- virtual_time(): the middle of the last turn. Of its end, the next request of a flow that has many
-- would often go before the only one of another.
-- first_of(flow, easy, picky): whichever ticket is first in the flow; either or both may be nil.
-- heads(flow): its first ticket; its first easy one.
-- set_tags(flow, start): sets the tags of these two; a flow without tickets is removed.
-- take_out(flow, ticket, had_turn): removes a ticket that no longer waits; only a turn is charged.
-- drop_if_empty(): drops the line once nobody waits, as then nobody owes anything.
-- Wants locals: line, flows, easy_flows, waiting_prefix, picky_prefix; and lib number.
local function charge_of(ticket)
  return whole(string.match(ticket or '', '^%S+ (%d+) [x-]$'), 1e12) or 0
end

local function virtual_time()
  return whole(redis.call('HGET', line, 'tag'), 1e15) or 0
end

local since_ms = {}
local function first_of(flow, easy, picky)
  if not (easy and picky) then
    return easy or picky
  end
  since_ms[easy] = since_ms[easy] or redis.call('ZSCORE', waiting_prefix .. flow, easy)
  since_ms[picky] = since_ms[picky] or redis.call('ZSCORE', picky_prefix .. flow, picky)
  local easy_ms, picky_ms = tonumber(since_ms[easy]), tonumber(since_ms[picky])
  if easy_ms == picky_ms then
    return easy < picky and easy or picky
  end
  return easy_ms < picky_ms and easy or picky
end

local function heads(flow)
  local easy = redis.call('ZRANGE', waiting_prefix .. flow, 0, 0)[1]
  local picky = redis.call('ZRANGE', picky_prefix .. flow, 0, 0)[1]
  return first_of(flow, easy, picky), easy
end

local function put(index, flow, start, ticket)
  if ticket then
    redis.call('ZADD', index, string.format('%.0f', start + charge_of(ticket)), flow)
  else
    redis.call('ZREM', index, flow)
  end
end

local function set_tags(flow, start)
  local first, easy = heads(flow)
  put(flows, flow, start, first)
  put(easy_flows, flow, start, easy)
end

local function take_out(flow, ticket, had_turn)
  local first = heads(flow)
  local tag = tonumber(redis.call('ZSCORE', flows, flow) or virtual_time() + charge_of(first))
  local taken = redis.call('ZREM', waiting_prefix .. flow, ticket)
  if taken == 0 and redis.call('ZREM', picky_prefix .. flow, ticket) == 0 then
    return
  end
  local start = tag - charge_of(first)
  if had_turn then
    local middle = start + math.floor(charge_of(ticket) / 2)
    redis.call('HSET', line, 'tag', string.format('%.0f', math.max(middle, virtual_time())))
    start = start + charge_of(ticket)
  end
  set_tags(flow, start)
end

local function drop_if_empty()
  if redis.call('EXISTS', flows) == 0 then
    redis.call('DEL', line)
  end
end
