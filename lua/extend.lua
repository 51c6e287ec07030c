-- extend: keeps reservations of requests that a door still carries. One that expired while the door
-- could not say so, or that Redis has lost, is made again, however full the worker is.
--
-- KEYS[1] load           hash   inc -> load
-- KEYS[2] reservations   hash   request_id -> inc
-- KEYS[3] expiry         zset   request_id -> expiry, ms
-- KEYS[4] requests:      hashes inc -> its requests
-- KEYS[5] prefills:      lists  inc -> its requests still prefilling
-- KEYS[6] versions       zset   inc -> version of its last change
-- ARGV[1] carried_ms     int    > 0; from now on they last so long, unless extended again
-- ARGV[2...]    ExtendRow str   of app/state/records.py: id of the reservation; attempt that made it; inc,
--                               now that of its worker; prefill_tokens, prefill_us and blocks as
--                               reserved; state, `p` until the first token is out, then `d`
-- Returns  {outcome, ...}       for each, in order: 1 extended; 2 reserved again; 0 neither, as its
--                               worker is not routed to, or another try has the reservation now
-- Cost     O(requests * log reservations). Writes. Safe to retry.
local load, reservations, expiry = KEYS[1], KEYS[2], KEYS[3]
local requests_prefix, prefills_prefix, versions = KEYS[4], KEYS[5], KEYS[6]
-- @include clock
-- @include load
-- @include changed
-- @include record
-- @include rows
-- @include reserve_on
-- @include despite_full

despite_full(reservations)
local now = now_ms()
local ends_ms = now + tonumber(ARGV[1])
local FIELDS = {} -- @fields extend

local function extend(row)
  local request_id, request, owner = find(row.id)
  if request and request.attempt == row.attempt then
    redis.call('ZADD', expiry, string.format('%d', ends_ms), request_id)
    local source = request.has_source and record_of(source_of(request_id))
    if source and not is_leased(source) then
      redis.call('ZADD', expiry, 'XX', 'GT', string.format('%d', ends_ms), source_of(request_id))
    end
    return 1
  end
  local l = not owner and parse_load(redis.call('HGET', load, row.inc))
  if not l then
    return 0
  end
  reserve_on(l, row.inc, request_id, {
    prefill_tokens = tonumber(row.prefill_tokens), prefill_us = tonumber(row.prefill_us),
    blocks = tonumber(row.blocks), state = row.state, attempt = row.attempt,
  }, now, ends_ms)
  return 2
end

local outcomes = {}
for i, row in ipairs(rows(2, FIELDS)) do
  outcomes[i] = extend(row)
end
return outcomes
