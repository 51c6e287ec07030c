-- reserve: promises workers' capacity to requests, each only if its worker is as the router saw it.
--
-- KEYS[1] leases         zset   inc -> expiry, ms
-- KEYS[2] load           hash   inc -> load
-- KEYS[3] reservations   hash   request_id -> inc
-- KEYS[4] expiry         zset   request_id -> expiry, ms
-- KEYS[5] requests:      hashes inc -> its requests
-- KEYS[6] prefills:      lists  inc -> its requests still prefilling
-- KEYS[7] meta           hash   rounds, in millionths: each reservation adds 1 / leases; flow, of the last
--                               one; mixed_ms, when a flow followed another
-- KEYS[8] versions       zset   inc -> version of its last change
-- KEYS[9] fetches        zset   attempt -> until when, ms; see lib/fetches
-- KEYS[10] fetching      hash   attempt -> what it fetches
-- ARGV[1] ttl_ms         int    > 0; forgotten after that, whatever becomes of the router
-- ARGV[2] prefill_ttl_ms int    > 0; forgotten after that, plus four times what the worker's queue of
--                               prefills is predicted to last, of two workers the longer, unless the
--                               first token is out by then; never later than after ttl_ms
-- ARGV[3] carried_ms     int    > 0; what a door carries is forgotten after that, unless extended
-- ARGV[4] since          int    as for `loads`
-- ARGV[5...]    ReserveRow str   of app/state/records.py, decided one after another; one without
--                               request_id is of the worker that computes or holds the prompt for
--                               the next one: both are made or neither:
--                               inc, the chosen worker's; request_id, the reservation's key,
--                               or, if another tag has that, `<request_id>~<tag>`; what is there
--                               is given back first, unless a later try made it; prefill_tokens
--                               to compute, 0 of a source: it only holds blocks, and takes no
--                               request's place; prefill_us, the predicted time for them; blocks of
--                               KV that the request keeps in use; attempt, `<began, ms>-<tag>`,
--                               without spaces: when the try began, by the Redis clock, and what
--                               tells it from others with its id, the same if a balancer sends it
--                               again; max_requests, at which the worker is full;
--                               seen_total, the reservations ever made on the worker when the
--                               router looked: if another was made since, this one is refused, and
--                               so is every later one of this call for the same worker, as it
--                               counted on this one; -1: reserve regardless; retry, 0 or 1: take
--                               the request_id, whichever tag has it; carried, 0 or 1: by a door;
--                               sending_ms, for how long handing its KV on keeps its link busy;
--                               receiving_ms, in how many the prefix will have come that it fetches;
--                               fetch, of a source that keeps what it hands on for a time, as told
--                               to begin_fetch, else ''; flow, of its turns, '': of none
-- Returns  {{outcome, ...}}     for each request, in order: 1 made, or why not: "lapsed", "full",
--                               "changed"; "superseded" if a later try holds the reservation
--          {{outcome, ...}, fresh}   if any was refused: also loads as of after the last request,
--                               to decide again from; see lib/snapshot
-- Cost     O(requests * log reservations); a refusal as `loads`. Writes. Safe to retry.
local leases, load, reservations, expiry = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local requests_prefix, prefills_prefix, meta, versions = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local fetches, fetching = KEYS[9], KEYS[10]
local ttl_ms, prefill_ttl_ms, carried_ms = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
-- @include clock
-- @include number
-- @include load
-- @include changed
-- @include record
-- @include request
-- @include rows
-- @include reserve_on
-- @include end_fetch
-- @include snapshot
-- @include despite_full

despite_full(load)
local now = now_ms()
local FIELDS = {} -- @fields reserve
local wishes = rows(5, FIELDS)
-- Two for each request: more than come in, and few enough for one call.
unreserve_expired(now, 2 * #wishes)
local overtaken = {}
local known = redis.call('HMGET', meta, 'rounds', 'flow')
local rounds, flow, is_mixed = whole(known[1], 1e15) or 0, known[2], false
local share = math.floor(1e6 / math.max(1, redis.call('ZCARD', leases)))
local FETCH_KEPT_MS = 600000 -- after it may have begun too late
local MEMORY = 16e6 -- rounds in which what was routed to a worker fades by a factor of e

-- The key that a try's reservation gets, and the record that is there.
local function place(wish)
  local tag = tag_of(wish.attempt)
  if wish.retry == '1' or not tag then
    return wish.request_id, record_of(wish.request_id)
  end
  return find(wish.request_id .. '~' .. tag)
end

-- The load of a worker that can be promised, or why it cannot. state: of the request there.
local function room_on(wish, state)
  local lease = redis.call('ZSCORE', leases, wish.inc)
  local l = parse_load(redis.call('HGET', load, wish.inc))
  if not l or not lease or tonumber(lease) <= now then
    return nil, 'lapsed'
  end
  if state == 'p' and l.requests >= tonumber(wish.max_requests) then
    return nil, 'full'
  end
  if wish.seen_total ~= '-1'
    and (overtaken[wish.inc] or l.total ~= tonumber(wish.seen_total)) then
    overtaken[wish.inc] = true
    return nil, 'changed'
  end
  return l
end

-- For how long a prefill stays promised there.
local function stays_ms(wish, l)
  if wish.carried == '1' then
    return carried_ms
  end
  -- The queue is in microseconds: a 250th of it is four times as long, in ms.
  return math.min(ttl_ms, prefill_ttl_ms + (l.prefill_us + wish.prefill_us) / 250)
end

local function reserve_wish(l, wish, request_id, state, has_source, ends_ms)
  rounds = rounds + share
  l.routed_tokens = math.floor(l.routed_tokens * math.exp(math.min(0, l.routed_at - rounds) / MEMORY))
    + wish.prefill_tokens
  l.routed_at = rounds
  if wish.sending_ms ~= '0' then
    l.sending_until_ms = math.max(l.sending_until_ms, now) + tonumber(wish.sending_ms)
  end
  if wish.receiving_ms ~= '0' then
    l.receiving_until_ms = math.max(l.receiving_until_ms, now + tonumber(wish.receiving_ms))
  end
  reserve_on(l, wish.inc, request_id, {
    prefill_tokens = wish.prefill_tokens, prefill_us = tonumber(wish.prefill_us),
    blocks = wish.blocks, state = state, attempt = wish.attempt, has_source = has_source,
  }, now, ends_ms)
end

-- told: the milliseconds that its source keeps it, and the record; see lib/fetches.
local function begin_fetch(attempt, told)
  local before = string.format('%d', now - FETCH_KEPT_MS)
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', fetches, '-inf', before, 'LIMIT', 0, 2)) do
    forget_fetch(old)
  end
  local kept_ms, record = string.match(told, '^(%d+) (.+)$')
  redis.call('ZADD', fetches, string.format('%d', now + kept_ms), attempt)
  redis.call('HSET', fetching, attempt, record)
end

-- source: the wish of the worker that computes or holds the prompt for this one; nil: there is none.
local function reserve(wish, source)
  local request_id, held = place(wish)
  if held and began_ms_of(held.attempt) > began_ms_of(wish.attempt) then
    return 'superseded'
  end
  unreserve(request_id, now)
  if source then
    -- Left behind if the worker that it was for has ended.
    unreserve(source_of(request_id), now)
  end
  local l, why = room_on(wish, 'p')
  if not l then
    return why
  end
  local lasts_ms = stays_ms(wish, l)
  if source then
    local state = source.prefill_tokens == '0' and 'h' or 'p'
    local source_load
    source_load, why = room_on(source, state)
    if not source_load then
      return why
    end
    -- Both end together, so neither is promised for nothing.
    lasts_ms = math.max(lasts_ms, stays_ms(source, source_load))
    reserve_wish(source_load, source, source_of(request_id), state, false, now + lasts_ms)
    if source.fetch ~= '' then
      begin_fetch(wish.attempt, source.fetch)
    end
  end
  reserve_wish(l, wish, request_id, 'p', source ~= nil, now + lasts_ms)
  return 1
end

local outcomes, refused, source = {}, false, nil
for _, wish in ipairs(wishes) do
  if wish.request_id == '' then
    source = wish
  else
    local outcome = reserve(wish, source)
    outcomes[#outcomes + 1], source = outcome, nil
    refused = refused or outcome ~= 1
    if wish.flow ~= '' then
      is_mixed = is_mixed or flow and flow ~= wish.flow
      flow = wish.flow
    end
  end
end
if flow and (flow ~= known[2] or is_mixed) then
  redis.call('HSET', meta, 'flow', flow, 'mixed_ms', is_mixed and string.format('%d', now) or 0)
end
redis.call('HSET', meta, 'rounds', string.format('%d', rounds))
if not refused then
  return {outcomes}
end
return {outcomes, snapshot(now, ARGV[4])}
