-- retire_lapsed: retires incarnations whose lease lapsed some time ago.
--
-- KEYS[1] workers       hash   inc -> info
-- KEYS[2] current       hash   worker -> inc
-- KEYS[3] leases        zset   inc -> expiry, ms
-- KEYS[4] writers       hash   inc -> nonce
-- KEYS[5] load          hash   inc -> load
-- KEYS[6] reservations  hash   request_id -> inc
-- KEYS[7] expiry        zset   request_id -> expiry, ms
-- KEYS[8] requests:     hashes inc -> its requests
-- KEYS[9] prefills:     lists  inc -> its requests still prefilling
-- KEYS[10] verdicts     hash   worker -> its marks; see lib/verdict
-- KEYS[11] versions      zset   inc -> version of its last change
-- KEYS[12] events       stream kind, subject, text
-- ARGV[1] grace_ms      int    a lease that lapsed more recently may still be renewed: nobody is
--                              routed there meanwhile, but its requests and blocks are kept
-- ARGV[2] heard_ms      int    when Redis last answered, by its clock. Nobody could renew since,
--                              and this call may have waited in a Redis that hung
-- ARGV[3] away_grace_ms int   the same of one for which routers vouched, as its agent was away
-- Returns  how many were retired, at most 16; fewer once they had 512 requests, 4 us each
-- Cost     O(16 * log workers + workers that lapsed + requests of a worker). Writes. Safe to retry.
local workers, current, leases, writers, load = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local reservations, expiry, requests_prefix, prefills_prefix = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local verdicts, versions, events = KEYS[10], KEYS[11], KEYS[12]
local grace_ms, heard_ms, away_grace_ms = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
-- @include clock
-- @include info
-- @include verdict
-- @include keep_verdict
-- @include load
-- @include changed
-- @include record
-- @include request
-- @include retire
-- @include despite_full
-- @include event

despite_full(workers)
local now = now_ms()
local heard = math.min(now, heard_ms)
local too_late = string.format('%d', heard - grace_ms)
local lapsed = redis.call('ZRANGEBYSCORE', leases, '-inf', too_late, 'LIMIT', 0, 512)

-- Its agent cannot register it again soon, and its engine may only be out of reach, or start anew.
local function may_return(inc, worker)
  local away = worker and redis.call('HGET', current, worker) == inc and marks_of(worker, now).away
  return away and away.until_ms + away_grace_ms > heard
end

local retired, dropped = 0, 0
for _, inc in ipairs(lapsed) do
  local worker = info_of(inc).worker
  if retired < 16 and dropped < 512 and not may_return(inc, worker) then
    local requests = retire(inc, worker, now)
    retired, dropped = retired + 1, dropped + requests
    note_event('lost', worker or inc, requests .. ' requests were on it')
  end
end
return retired
