-- release: a request has ended; give back what was promised to it.
--
-- KEYS[1] load           hash   inc -> load
-- KEYS[2] reservations   hash   request_id -> inc
-- KEYS[3] expiry         zset   request_id -> expiry, ms
-- KEYS[4] requests:      hashes inc -> its requests
-- KEYS[5] prefills:      lists  inc -> its requests still prefilling
-- ARGV[1] request_id     str
-- ARGV[2] attempt        str    only the reservation made with this attempt; '': any
-- ARGV[3] expires_by_ms  int    only one that expires by then: if a release comes late, the id may
--                               have a newer reservation. -1: any
-- Returns  1                    released
--          0                    there is no such reservation (any more)
-- Cost     O(prefills on the worker). Writes. Safe to retry.
local load, reservations, expiry = KEYS[1], KEYS[2], KEYS[3]
local requests_prefix, prefills_prefix = KEYS[4], KEYS[5]
local request_id, attempt, expires_by_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
-- @include clock
-- @include load
-- @include request

if attempt ~= '' then
  local inc = redis.call('HGET', reservations, request_id) or ''
  local request = parse_request(redis.call('HGET', requests_prefix .. inc, request_id))
  if request and request.attempt ~= attempt then
    return 0
  end
end
if expires_by_ms >= 0
  and tonumber(redis.call('ZSCORE', expiry, request_id) or 0) > expires_by_ms then
  return 0
end
return unreserve(request_id, now_ms()) and 1 or 0
