-- prefill_complete: a request's first token is out; its prefill no longer waits on the worker, and
-- what its source held for it is given back. Of a source: the prompt is computed, and its blocks
-- wait to be fetched.
--
-- KEYS[1] load           hash   inc -> load
-- KEYS[2] reservations   hash   request_id -> inc
-- KEYS[3] expiry         zset   request_id -> expiry, ms
-- KEYS[4] requests:      hashes inc -> its requests
-- KEYS[5] prefills:      lists  inc -> its requests still prefilling
-- KEYS[6] versions       zset   inc -> version of its last change
-- ARGV[1] id             str    of the reservation, or of the request
-- ARGV[2] ttl_ms         int    > 0; how much longer the reservation lasts, if it is not released
-- ARGV[3] began_by_ms    int    only one whose try began by then, as for `release`. -1: any
-- ARGV[4] of_source      0|1    1: of its source
-- Returns  attempt              the attempt that had reserved; its prefill is complete
--          "-"                  as above, but the record cannot be read
--          nil                  there is no such reservation
-- Cost     O(prefills on the worker). Writes. Safe to retry.
local load, reservations, expiry = KEYS[1], KEYS[2], KEYS[3]
local requests_prefix, prefills_prefix, versions = KEYS[4], KEYS[5], KEYS[6]
-- @include clock
-- @include load
-- @include changed
-- @include record
-- @include request

local request_id, request, inc = find(ARGV[1])
if ARGV[4] == '1' then
  request_id, request, inc = find(source_of(request_id))
end
if not inc then
  return nil
end
local began_by_ms = tonumber(ARGV[3])
if request and began_by_ms >= 0 and began_ms_of(request.attempt) > began_by_ms then
  return nil
end
local l = parse_load(redis.call('HGET', load, inc))
if request and l and request.state == 'p' then
  local now = now_ms()
  local ends = string.format('%d', now + tonumber(ARGV[2]))
  end_prefill(l, inc, request_id, request, now)
  if ARGV[4] == '1' then
    l.requests = l.requests - 1
    request.state = 'h'
    redis.call('ZADD', expiry, 'XX', ends, request_id)
  else
    l.decoding = l.decoding + 1
    request.state = 'd'
    redis.call('ZADD', expiry, 'XX', 'GT', ends, request_id)
  end
  redis.call('HSET', load, inc, format_load(l))
  changed(inc)
  if request.has_source then
    unreserve(source_of(request_id), now)
    request.has_source = false
  end
  redis.call('HSET', requests_prefix .. inc, request_id, format_request(request))
end
return request and request.attempt or '-'
