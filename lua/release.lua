-- release: gives back what was promised to requests that have ended, each in turn.
--
-- KEYS[1] load           hash   inc -> load
-- KEYS[2] reservations   hash   request_id -> inc
-- KEYS[3] expiry         zset   request_id -> expiry, ms
-- KEYS[4] requests:      hashes inc -> its requests
-- KEYS[5] prefills:      lists  inc -> its requests still prefilling
-- KEYS[6] verdicts       hash   worker -> its marks; see lib/verdict
-- KEYS[7] versions       zset   inc -> version of its last change
-- KEYS[8] workers        hash   inc -> info
-- KEYS[9] current        hash   worker -> inc
-- KEYS[10] fetches       zset   attempt -> until when, ms; see lib/fetches
-- KEYS[11] fetching      hash   attempt -> what it fetches
-- ARGV[1...]    ReleaseRow str   of app/state/records.py:
--                               id, of the reservation, or of the request; attempt, only the
--                               reservation made with this attempt, '': any; began_by_ms, only one
--                               whose try began by then: if a release comes late, the id may have a
--                               newer reservation, -1: any; came, 0..3, 1: if its first token
--                               came, its worker has answered it, which ends a row of failures
--                               before it was routed, 2: it came, with the end, 3: it came, with
--                               an end that is none of an answer; late_ms, how much later than
--                               predicted its first token came, or has not come, -1: unknown
-- Returns  {outcome, ...}      of each request, in order:
--                               its attempt: released before the first token; that had reserved
--                               "-": released; the first token was out, or the record cannot be read
--                               nil: there is no such reservation (any more)
-- Cost     O(requests * prefills on the worker). Writes. Safe to retry.
local load, reservations, expiry = KEYS[1], KEYS[2], KEYS[3]
local requests_prefix, prefills_prefix, verdicts = KEYS[4], KEYS[5], KEYS[6]
local versions, workers, current = KEYS[7], KEYS[8], KEYS[9]
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
local FIELDS = {} -- @fields release

local function release(id, attempt, began_by_ms, came, late_ms)
  local request_id, request, inc = find(id)
  if request and attempt ~= '' and request.attempt ~= attempt then
    return false
  end
  if request and began_by_ms >= 0 and began_ms_of(request.attempt) > began_by_ms then
    return false
  end
  if request and request.has_source then
    local source, has_begun = record_of(source_of(request_id)), tonumber(came) >= 2
    if has_begun then
      -- Before a first token, what a source has computed has been fetched.
      unreserve(source_of(request_id), now)
      end_fetch(request.attempt, now)
    elseif source and source.state == 'p' then
      forget_fetch(request.attempt) -- the target was never asked
    end
  end
  if not unreserve(request_id, now) then
    return false
  end
  local is_early = request and request.state == 'p'
  if is_early then
    note_late(inc, late_ms, now)
  end
  if request and (came == '2' or came == '1' and not is_early) then
    answered(inc, began_ms_of(request.attempt), now)
  end
  return is_early and request.attempt or '-'
end

local outcomes = {}
for i, row in ipairs(rows(1, FIELDS)) do
  outcomes[i] = release(row.id, row.attempt, tonumber(row.began_by_ms), row.came, tonumber(row.late_ms))
end
return outcomes
