-- release: a request has ended; give back what was promised to it.
--
-- KEYS[1] load           hash   inc -> load
-- KEYS[2] reservations   hash   request_id -> inc
-- KEYS[3] expiry         zset   request_id -> expiry, ms
-- KEYS[4] requests:      hashes inc -> its requests
-- KEYS[5] prefills:      lists  inc -> its requests still prefilling
-- ARGV[1] id             str    of the reservation, or of the request
-- ARGV[2] attempt        str    only the reservation made with this attempt; '': any
-- ARGV[3] began_by_ms    int    only one whose try began by then: if a release comes late, the id may
--                               have a newer reservation. -1: any
-- Returns  attempt              released before the first token; the attempt that had reserved
--          "-"                  released; the first token was out, or the record cannot be read
--          nil                  there is no such reservation (any more)
-- Cost     O(prefills on the worker). Writes. Safe to retry.
local load, reservations, expiry = KEYS[1], KEYS[2], KEYS[3]
local requests_prefix, prefills_prefix = KEYS[4], KEYS[5]
local attempt, began_by_ms = ARGV[2], tonumber(ARGV[3])
-- @include clock
-- @include load
-- @include record
-- @include request

local request_id, request = find(ARGV[1])
if request and attempt ~= '' and request.attempt ~= attempt then
  return nil
end
if request and began_by_ms >= 0 and began_ms_of(request.attempt) > began_by_ms then
  return nil
end
local is_early = request and request.state == 'p'
return unreserve(request_id, now_ms()) and (is_early and request.attempt or '-')
