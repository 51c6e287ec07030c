-- beat: notes that a router replica is there, and what it measured lately. Replicas that have said
-- nothing for 15 s are forgotten.
--
-- KEYS[1] replicas  hash    replica -> when, ms, and what it measured
-- KEYS[2] events    stream  kind, subject, text
-- KEYS[3] meta      hash    version
-- KEYS[4] workers   hash    inc -> JSON
-- ARGV[1] replica   str
-- ARGV[2] figures   JSON  '': it ends
-- ARGV[3] version   int   of the data model that it speaks
-- Returns  ms             the Redis clock
--          nil            the namespace holds another version, and is left alone
-- Cost     O(replicas). Writes. Safe to retry.
local replicas, events, meta, workers = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local replica, figures = ARGV[1], ARGV[2]
-- @include clock
-- @include number
-- @include meta
-- @include despite_full
-- @include event

if other_version(meta, workers, tonumber(ARGV[3])) then
  return nil
end
despite_full(replicas)
local now = now_ms()
if figures == '' then
  if redis.call('HDEL', replicas, replica) == 1 then
    note_event('replica_left', replica)
  end
elseif redis.call('HSET', replicas, replica, string.format('%d ', now) .. figures) == 1 then
  note_event('replica_joined', replica)
end
for _, name in ipairs(redis.call('HKEYS', replicas)) do
  local said = string.match(redis.call('HGET', replicas, name), '^%d+')
  if math.abs(now - (tonumber(said) or 0)) > 15000 then
    redis.call('HDEL', replicas, name)
    note_event('replica_lost', name)
  end
end
return now
