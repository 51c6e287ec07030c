-- pardon: what was counted against a worker was the request's own fault, as others refused it alike;
-- take it back. Its lease comes back with its next renewal.
--
-- KEYS[1] failures  hash  inc -> what its failures have come to
-- ARGV[1] inc       int   whose failure it was
-- ARGV[2] weight    int   of the failure in the share, in thousandths, below 1000
-- ARGV[3] subject   str   the model or path that it lacked; '': none
-- Returns  1
--          0             nothing is known of failures of the worker (any more)
-- Cost     O(1). Writes.
local failures, inc, weight, subject = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[3]
-- @include clock
-- @include number
-- @include failures

if subject ~= '' and redis.call('HDEL', failures, inc .. ' ' .. subject) == 1 then
  return 1
end
local now = now_ms()
local f = failures_of(inc, now)
if not f then
  return 0
end
f.count = math.max(f.count - 1, 0)
f.share = math.max((faded(f, now) - weight) / (1 - weight / 1000), 0)
if f.count < 2 then
  f.until_ms, f.trial = math.min(f.until_ms, now), false
end
keep_failures(inc, f, now)
return 1
