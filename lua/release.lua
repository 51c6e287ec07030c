-- release: a request has ended; give back what was promised to it.
--
-- KEYS[1] load           hash   inc -> load
-- KEYS[2] reservations   hash   request_id -> inc
-- KEYS[3] expiry         zset   request_id -> expiry, ms
-- KEYS[4] requests:      hashes inc -> its requests
-- KEYS[5] prefills:      lists  inc -> its requests still prefilling
-- KEYS[6] failures       hash   inc -> count and time of the last
-- KEYS[7] versions       zset   inc -> version of its last change
-- ARGV[1] id             str    of the reservation, or of the request
-- ARGV[2] attempt        str    only the reservation made with this attempt; '': any
-- ARGV[3] began_by_ms    int    only one whose try began by then: if a release comes late, the id may
--                               have a newer reservation. -1: any
-- ARGV[4] answered       0..2   1: if its first token came, its worker has answered it, which makes up
--                               for one failure before it was routed. 2: it came, with the end
-- Returns  attempt              released before the first token; the attempt that had reserved
--          "-"                  released; the first token was out, or the record cannot be read
--          nil                  there is no such reservation (any more)
-- Cost     O(prefills on the worker). Writes. Safe to retry.
local load, reservations, expiry = KEYS[1], KEYS[2], KEYS[3]
local requests_prefix, prefills_prefix, failures = KEYS[4], KEYS[5], KEYS[6]
local versions = KEYS[7]
local attempt, began_by_ms, answered = ARGV[2], tonumber(ARGV[3]), ARGV[4]
-- @include clock
-- @include number
-- @include load
-- @include changed
-- @include record
-- @include request
-- @include failures

local request_id, request, inc = find(ARGV[1])
if request and attempt ~= '' and request.attempt ~= attempt then
  return nil
end
if request and began_by_ms >= 0 and began_ms_of(request.attempt) > began_by_ms then
  return nil
end
local now = now_ms()
if request and request.has_source and answered == '2' then
  -- Before a first token, what a source has computed has been fetched.
  unreserve(source_of(request_id), now)
end
if not unreserve(request_id, now) then
  return nil
end
local is_early = request and request.state == 'p'
if request and (answered == '2' or answered == '1' and not is_early) then
  local count, last_ms = failures_of(inc, now)
  if began_ms_of(request.attempt) > last_ms and count > 1 then
    redis.call('HSET', failures, inc, string.format('%d %d', count - 1, last_ms))
  elseif began_ms_of(request.attempt) > last_ms and count == 1 then
    redis.call('HDEL', failures, inc)
  end
end
return is_early and request.attempt or '-'
