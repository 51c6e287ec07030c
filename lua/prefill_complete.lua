-- prefill_complete: records that requests' first tokens are out: their prefills no longer wait on the
-- worker, and what their sources held for them is given back. Of a source: the prompt is computed, and
-- its blocks wait to be fetched.
--
-- KEYS[1] load           hash   inc -> load
-- KEYS[2] reservations   hash   request_id -> inc
-- KEYS[3] expiry         zset   request_id -> expiry, ms
-- KEYS[4] requests:      hashes inc -> its requests
-- KEYS[5] prefills:      lists  inc -> its requests still prefilling
-- KEYS[6] versions       zset   inc -> version of its last change
-- KEYS[7] verdicts       hash   worker -> its marks; see lib/verdict
-- KEYS[8] workers        hash   inc -> info
-- KEYS[9] current        hash   worker -> inc
-- KEYS[10] fetches       zset   attempt -> until when, ms; see lib/fetches
-- KEYS[11] fetching      hash   attempt -> what it fetches
-- ARGV[1...]    PrefillCompleteRow str   of app/state/records.py, one after another:
--                               id, of the reservation, or of the request; ttl_ms, > 0, how much
--                               longer the reservation lasts, if it is not released; began_by_ms,
--                               only one whose try began by then, as for `release`, -1: any;
--                               of_source, 0 or 1: of its source; late_ms, how much later than
--                               predicted the first token came, -1: unknown
-- Returns  {outcome, ...}      of each request, in order:
--                               the attempt that had reserved; its prefill is complete
--                               "-": as above, but the record cannot be read
--                               nil: there is no such reservation
-- Cost     O(requests * prefills on the worker). Writes. Safe to retry.
local load, reservations, expiry = KEYS[1], KEYS[2], KEYS[3]
local requests_prefix, prefills_prefix, versions = KEYS[4], KEYS[5], KEYS[6]
local verdicts, workers, current = KEYS[7], KEYS[8], KEYS[9]
local fetches, fetching = KEYS[10], KEYS[11]
-- @include clock
-- @include load
-- @include changed
-- @include record
-- @include request
-- @include rows
-- @include info
-- @include verdict
-- @include keep_verdict
-- @include failures
-- @include late
-- @include end_fetch

local now = now_ms()
local FIELDS = {} -- @fields prefill_complete

local function complete(inc, l, request_id, request, ttl_ms, of_source)
  local ends = string.format('%d', now + ttl_ms)
  end_prefill(l, inc, request_id, request, now)
  if of_source then
    l.requests = l.requests - 1
    request.state = 'h'
    redis.call('ZADD', expiry, 'XX', ends, request_id)
    -- The target is asked now, and not before.
    redis.call('ZADD', fetches, 'XX', 'GT', string.format('%d', now), request.attempt)
  else
    l.decoding = l.decoding + 1
    request.state = 'd'
    redis.call('ZADD', expiry, 'XX', 'GT', ends, request_id)
  end
  redis.call('HSET', load, inc, format_load(l))
  changed(inc)
  if request.has_source then
    unreserve(source_of(request_id), now)
    end_fetch(request.attempt, now)
    request.has_source = false
  end
  redis.call('HSET', requests_prefix .. inc, request_id, format_request(request))
end

local function prefill_complete(id, ttl_ms, began_by_ms, of_source, late_ms)
  local request_id, request, inc = find(id)
  if of_source then
    request_id, request, inc = find(source_of(request_id))
  end
  if not inc then
    return false
  end
  if request and began_by_ms >= 0 and began_ms_of(request.attempt) > began_by_ms then
    return false
  end
  local l = parse_load(redis.call('HGET', load, inc))
  if request and l and request.state == 'p' then
    complete(inc, l, request_id, request, ttl_ms, of_source)
    if of_source then
      answered(inc, began_ms_of(request.attempt), now)
    else
      began_to_answer(inc, now)
      note_late(inc, late_ms, now)
    end
  end
  return request and request.attempt or '-'
end

local outcomes = {}
for i, row in ipairs(rows(1, FIELDS)) do
  outcomes[i] = prefill_complete(
    row.id, tonumber(row.ttl_ms), tonumber(row.began_by_ms), row.of_source == '1', tonumber(row.late_ms)
  )
end
return outcomes
