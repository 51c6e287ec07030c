-- release: a request has ended; give back what was promised to it.
--
-- KEYS[1] load           hash   inc -> load
-- KEYS[2] reservations   hash   request_id -> inc
-- KEYS[3] expiry         zset   request_id -> expiry, ms
-- KEYS[4] requests:      hashes inc -> its requests
-- KEYS[5] prefills:      lists  inc -> its requests still prefilling
-- KEYS[6] failures       hash   inc -> count and time of the last
-- ARGV[1] request_id     str
-- ARGV[2] attempt        str    only the reservation made with this attempt; '': any
-- ARGV[3] began_by_ms    int    only one whose try began by then: if a release comes late, the id may
--                               have a newer reservation. -1: any
-- ARGV[4] answered       0|1    1: if its first token came, its worker has answered it, which makes up
--                               for one failure before it was routed
-- Returns  1                    released
--          0                    there is no such reservation (any more)
-- Cost     O(prefills on the worker). Writes. Safe to retry.
local load, reservations, expiry = KEYS[1], KEYS[2], KEYS[3]
local requests_prefix, prefills_prefix, failures = KEYS[4], KEYS[5], KEYS[6]
local request_id, attempt, began_by_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
local answered = ARGV[4] == '1'
-- @include clock
-- @include number
-- @include load
-- @include record
-- @include request
-- @include failures

local inc = redis.call('HGET', reservations, request_id)
local request = inc and record_of(request_id, inc)
if request and attempt ~= '' and request.attempt ~= attempt then
  return 0
end
if request and began_by_ms >= 0 and began_ms_of(request.attempt) > began_by_ms then
  return 0
end
local now = now_ms()
if not unreserve(request_id, now) then
  return 0
end
if answered and request and request.state == 'd' then
  local count, last_ms = failures_of(inc, now)
  if began_ms_of(request.attempt) > last_ms and count > 1 then
    redis.call('HSET', failures, inc, string.format('%d %d', count - 1, last_ms))
  elseif began_ms_of(request.attempt) > last_ms and count == 1 then
    redis.call('HDEL', failures, inc)
  end
end
return 1
