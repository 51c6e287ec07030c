-- expire: forget reservations whose time is up.
--
-- KEYS[1] load           hash   inc -> load
-- KEYS[2] reservations   hash   request_id -> inc
-- KEYS[3] expiry         zset   request_id -> expiry, ms
-- KEYS[4] requests:      hashes inc -> its requests
-- KEYS[5] prefills:      lists  inc -> its requests still prefilling
-- ARGV[1] limit          int    at most so many
-- Returns  how many were forgotten
-- Cost     O(limit * prefills on a worker). Writes. Safe to retry.
local load, reservations, expiry = KEYS[1], KEYS[2], KEYS[3]
local requests_prefix, prefills_prefix = KEYS[4], KEYS[5]
local limit = tonumber(ARGV[1])
-- @include clock
-- @include load
-- @include request

return unreserve_expired(now_ms(), limit)
