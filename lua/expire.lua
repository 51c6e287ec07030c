-- expire: forgets reservations whose time is up.
--
-- KEYS[1] load           hash   inc -> load
-- KEYS[2] reservations   hash   request_id -> inc
-- KEYS[3] expiry         zset   request_id -> expiry, ms
-- KEYS[4] requests:      hashes inc -> its requests
-- KEYS[5] prefills:      lists  inc -> its requests still prefilling
-- KEYS[6] versions       zset   inc -> version of its last change
-- ARGV[1] limit          int    how many at most
-- Returns  how many were forgotten
-- Cost     O(limit * prefills on a worker + log reservations). Writes. Safe to retry.
local load, reservations, expiry = KEYS[1], KEYS[2], KEYS[3]
local requests_prefix, prefills_prefix, versions = KEYS[4], KEYS[5], KEYS[6]
-- @include clock
-- @include load
-- @include changed
-- @include record
-- @include request
-- @include despite_full

despite_full(reservations)
return unreserve_expired(now_ms(), tonumber(ARGV[1]))
