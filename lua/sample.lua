-- sample: adds what all replicas measured to the history, unless another replica did for this step.
--
-- KEYS[1] history          stream  sample
-- KEYS[2] history_minutes  stream  sample
-- KEYS[3] replicas         hash    replica -> what it measured
-- ARGV[1] step_ms          int     a minute: for history_minutes
-- ARGV[2] kept             int     entries, about
-- ARGV[3] sample           JSON
-- Returns  ms                      when the step began, by the Redis clock
--          0                       it has its sample
-- Cost     O(1). Writes. Safe to retry.
local history, minutes, replicas = KEYS[1], KEYS[2], KEYS[3]
local step_ms, kept, sample = tonumber(ARGV[1]), ARGV[2], ARGV[3]
-- @include clock
-- @include despite_full

despite_full(replicas)
local now = now_ms()
local at = now - now % step_ms
local stream = step_ms < 60000 and history or minutes
local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
local last_ms = last and tonumber(string.match(last[1], '^%d+')) or 0
if last_ms > now then
  -- Written before the clock was set back, or by hand: nothing could follow it.
  redis.call('DEL', stream)
elseif last_ms >= at then
  return 0
end
redis.call('XADD', stream, 'MAXLEN', '~', kept, string.format('%d-0', at), 'sample', sample)
return at
