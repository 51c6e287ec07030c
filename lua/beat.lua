-- beat: a router replica says that it is there, and what it measured lately. Those that have said
-- nothing for 15 s are forgotten.
--
-- KEYS[1] replicas  hash  replica -> when, ms, and what it measured
-- ARGV[1] replica   str
-- ARGV[2] figures   JSON  '': it ends
-- Returns  ms             the Redis clock
-- Cost     O(replicas). Writes. Safe to retry.
local replicas = KEYS[1]
local replica, figures = ARGV[1], ARGV[2]
-- @include clock
-- @include despite_full

despite_full(replicas)
local now = now_ms()
if figures == '' then
  redis.call('HDEL', replicas, replica)
else
  redis.call('HSET', replicas, replica, string.format('%d ', now) .. figures)
end
for _, name in ipairs(redis.call('HKEYS', replicas)) do
  local said = string.match(redis.call('HGET', replicas, name), '^%d+')
  if math.abs(now - (tonumber(said) or 0)) > 15000 then
    redis.call('HDEL', replicas, name)
  end
end
return now
