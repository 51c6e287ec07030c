-- taint: a worker's engine may hold KV of one prompt as another's. From now on nothing goes there,
-- whoever renews its lease, and be it the last worker, until its engine has begun anew or dropped what
-- it holds. Marks of workers that have been gone for a day are dropped.
--
-- KEYS[1] workers   hash  inc -> info
-- KEYS[2] current   hash  worker -> inc
-- KEYS[3] leases    zset  inc -> expiry, ms
-- KEYS[4] failures  hash  "tainted " worker -> since when, ms, and the life of its engine
-- KEYS[5] events    stream  kind, subject, text
-- ARGV[1] worker    str   "<worker_id>:<dp_rank>"
-- ARGV[2] life      str   of its engine, as registered when it was given what tainted it
-- ARGV[3] why       str
-- Returns  1              marked
--          0              it was, or its engine has begun anew since
-- Cost     O(log workers + workers that drain or failed). Writes. Safe to retry.
local workers, current, leases, failures, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local worker, life, why = ARGV[1], ARGV[2], ARGV[3]
-- @include clock
-- @include tainted
-- @include despite_full
-- @include event

despite_full(failures)
local now = now_ms()
for _, name in ipairs(redis.call('HKEYS', failures)) do
  local gone = string.match(name, '^tainted (.+)$')
  local since_ms = gone and string.match(redis.call('HGET', failures, name), '^(%d+)')
  if since_ms and now - since_ms > 86400000 and redis.call('HEXISTS', current, gone) == 0 then
    redis.call('HDEL', failures, name)
  end
end
local inc = redis.call('HGET', current, worker)
local lives = life_in(inc and redis.call('HGET', workers, inc))
if lives ~= '' and life ~= '' and process_of(lives) ~= process_of(life) then
  return 0
end
if inc then
  redis.call('ZADD', leases, string.format('%d', now), inc)
end
local is_new = redis.call('HSET', failures, 'tainted ' .. worker,
  string.format('%d %s', now, lives ~= '' and lives or life))
if is_new == 1 then
  note_event('tainted', worker, why)
end
return is_new
