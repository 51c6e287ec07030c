-- reserve: promise workers' capacity to requests, each only if its worker is as the router saw it.
--
-- KEYS[1] leases         zset   inc -> expiry, ms
-- KEYS[2] load           hash   inc -> load
-- KEYS[3] reservations   hash   request_id -> inc
-- KEYS[4] expiry         zset   request_id -> expiry, ms
-- KEYS[5] requests:      hashes inc -> its requests
-- KEYS[6] prefills:      lists  inc -> its requests still prefilling
-- KEYS[7] meta           hash   rounds, in millionths: each reservation adds 1 / leases
-- KEYS[8] versions       zset   inc -> version of its last change
-- ARGV[1] ttl_ms         int    > 0; forgotten after that, whatever becomes of the router
-- ARGV[2] prefill_ttl_ms int    > 0; forgotten after that, plus four times what the worker's queue of
--                               prefills is predicted to last, of two workers the longer, unless the
--                               first token is out by then; never later than after ttl_ms
-- ARGV[3] carried_ms     int    > 0; what a door carries is forgotten after that, unless extended
-- ARGV[4] since          int    as for `loads`
-- ARGV[5...]             str    twelve per request, decided one after another:
--                               inc, the chosen worker's; request_id, the reservation's key,
--                               or, if another tag has that, `<request_id>~<tag>`; what is there
--                               is given back first, unless a later try made it; prefill_tokens
--                               to compute; prefill_us, the predicted time for them; blocks of KV
--                               that the request keeps in use; attempt, `<began, ms>-<tag>`,
--                               without spaces: when the try began, by the Redis clock, and what
--                               tells it from others with its id, the same if a balancer sends it
--                               again; max_requests, at which the worker is full;
--                               seen_total, the reservations ever made on the worker when the
--                               router looked: if another was made since, this one is refused, and
--                               so is every later one of this call for the same worker, as it
--                               counted on this one; -1: reserve regardless; retry, 0 or 1: take
--                               the request_id, whichever tag has it; carried, 0 or 1: by a door;
--                               receiving, in how many ms the prefix will have come that it fetches;
--                               source, '' or what is promised of a second worker that computes or
--                               holds the prompt for the first, both or neither: inc, tokens, us,
--                               blocks, max_requests, seen_total, as above, and for how many ms
--                               handing its KV on keeps its link busy, with spaces between;
--                               with no tokens it only holds blocks, and takes no request's place
-- Returns  {{outcome, ...}}     for each request, in order: 1 made, or why not: "lapsed", "full",
--                               "changed"; "superseded" if a later try holds the reservation
--          {{outcome, ...}, fresh}   if any was refused: also loads as of after the last request,
--                               to decide again from; see lib/snapshot
-- Cost     O(requests * log reservations); a refusal as `loads`. Writes. Safe to retry.
local leases, load, reservations, expiry = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local requests_prefix, prefills_prefix, meta, versions = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local ttl_ms, prefill_ttl_ms, carried_ms = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
-- @include clock
-- @include number
-- @include load
-- @include changed
-- @include record
-- @include request
-- @include promise
-- @include snapshot
-- @include despite_full

despite_full(load)
local now = now_ms()
-- Two for each request: more than come in, and few enough for one call.
unreserve_expired(now, 2 * (#ARGV - 4) / 12)
local overtaken = {}
local rounds, share = rounds_so_far(), math.floor(1e6 / math.max(1, redis.call('ZCARD', leases)))
local MEMORY = 4e6 -- rounds in which what was routed to a worker fades by a factor of e

-- The key that a try's reservation gets, and the record that is there.
local function place(request_id, attempt, retry)
  local tag = tag_of(attempt)
  if retry == '1' or not tag then
    return request_id, record_of(request_id)
  end
  return find(request_id .. '~' .. tag)
end

-- The load of a worker that can be promised, or why it cannot.
local function room_on(inc, max_requests, seen_total)
  local lease = redis.call('ZSCORE', leases, inc)
  local l = parse_load(redis.call('HGET', load, inc))
  if not l or not lease or tonumber(lease) <= now then
    return nil, 'lapsed'
  end
  if max_requests and l.requests >= tonumber(max_requests) then
    return nil, 'full'
  end
  if seen_total ~= '-1' and (overtaken[inc] or l.total ~= tonumber(seen_total)) then
    overtaken[inc] = true
    return nil, 'changed'
  end
  return l
end

-- For how long a prefill stays promised there.
local function stays_ms(l, us)
  -- The queue is in microseconds: a 250th of it is four times as long, in ms.
  return math.min(ttl_ms, prefill_ttl_ms + (l.us + us) / 250)
end

local function promise_on(l, inc, request_id, request, ends_ms)
  rounds = rounds + share
  l.routed_us = math.floor(l.routed_us * math.exp(math.min(0, l.routed_at - rounds) / MEMORY))
    + request.us
  l.routed_at = rounds
  promise(l, inc, request_id, request, now, ends_ms)
end

local function reserve(inc, id, tokens, us, blocks, attempt, max_requests, seen_total, retry, carried,
    receiving_ms, source)
  local request_id, held = place(id, attempt, retry)
  if held and began_ms_of(held.attempt) > began_ms_of(attempt) then
    return 'superseded'
  end
  unreserve(request_id, now)
  if source ~= '' then
    -- Left behind if the worker that it was for has ended.
    unreserve(source_of(request_id), now)
  end
  local l, why = room_on(inc, max_requests, seen_total)
  if not l then
    return why
  end
  local request = {tokens = tokens, us = tonumber(us), blocks = blocks, state = 'p', attempt = attempt}
  local lasts_ms = carried == '1' and carried_ms or stays_ms(l, request.us)
  if source ~= '' then
    local s_inc, s_tokens, s_us, s_blocks, s_max, s_total, s_sending_ms =
      string.match(source, '^(%d+) (%d+) (%d+) (%d+) (%d+) (%-?%d+) (%d+)$')
    local state = s_tokens == '0' and 'h' or 'p'
    local s
    s, why = room_on(s_inc, state == 'p' and s_max, s_total)
    if not s then
      return why
    end
    request.has_source = true
    -- Both end together, so neither is promised for nothing.
    lasts_ms = carried == '1' and carried_ms or math.max(lasts_ms, stays_ms(s, tonumber(s_us)))
    s.sending_until_ms = math.max(s.sending_until_ms, now) + tonumber(s_sending_ms)
    promise_on(s, s_inc, source_of(request_id), {
      tokens = s_tokens, us = tonumber(s_us), blocks = s_blocks, state = state, attempt = attempt,
    }, now + lasts_ms)
  end
  if receiving_ms ~= '0' then
    l.receiving_until_ms = math.max(l.receiving_until_ms, now + tonumber(receiving_ms))
  end
  promise_on(l, inc, request_id, request, now + lasts_ms)
  return 1
end

local outcomes, refused = {}, false
for i = 5, #ARGV, 12 do
  local outcome = reserve(unpack(ARGV, i, i + 11))
  outcomes[#outcomes + 1] = outcome
  refused = refused or outcome ~= 1
end
redis.call('HSET', meta, 'rounds', string.format('%d', rounds))
if not refused then
  return {outcomes}
end
return {outcomes, snapshot(now, ARGV[4])}
