-- propose: records what the leading planner proposes, and what it is about to do. Refused to a planner
-- whose lease has ended, or that another has followed.
--
-- KEYS[1] planner    hash    holder, token, until_ms, state, desired, size, reason, victim, values
-- KEYS[2] proposals  stream  proposal
-- KEYS[3] events     stream  kind, subject, text
-- ARGV[1] token      n       of the leader
-- ARGV[2] state      str     JSON: what the next leader has to know
-- ARGV[3] kept       n       entries of the stream, about
-- ARGV[4] proposal   str     JSON; '': nothing new
-- ARGV[5...] shown   str     fields of `planner` and their values
-- Returns  1 recorded
--          0 refused
-- Cost     O(1). Writes. Not safe to retry: the proposal would be recorded twice.
local planner, proposals, events = KEYS[1], KEYS[2], KEYS[3]
local token, state, kept, proposal = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
-- @include clock
-- @include despite_full
-- @include event

local held = redis.call('HMGET', planner, 'token', 'until_ms')
if held[1] ~= token or (tonumber(held[2]) or 0) <= now_ms() then
  return 0
end
despite_full(planner)
local before = redis.call('HGET', planner, 'desired')
redis.call('HSET', planner, 'state', state)
for i = 5, #ARGV, 2 do
  redis.call('HSET', planner, ARGV[i], ARGV[i + 1])
end
if proposal ~= '' then
  redis.call('XADD', proposals, 'MAXLEN', '~', kept, '*', 'proposal', proposal)
end
local after = redis.call('HMGET', planner, 'desired', 'reason')
if after[1] and after[1] ~= before then
  note_event('proposal', 'planner', after[1] .. ' workers: ' .. (after[2] or ''))
end
return 1
