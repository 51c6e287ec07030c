-- open_shard: lets an incarnation publish in a shard of the index.
--
-- KEYS[1] shard        hash   bucket_bits, swept_ms; created here if there is no readable one
-- KEYS[2] applied      hash   inc -> "<seq> <nonce>" of its last batch
-- KEYS[3] dead         set    inc whose entries may still be present
-- ARGV[1] inc          int
-- ARGV[2] nonce        str    as registered
-- ARGV[3] bucket_bits  int    1-24; counts only if the shard is new
-- Returns  1
--          0                  the number is not free here, as another incarnation had it before
--                             Redis lost data: register again
-- Cost     O(1). Writes. Safe to retry.
local shard, applied, dead = KEYS[1], KEYS[2], KEYS[3]
local inc, nonce, bucket_bits = ARGV[1], ARGV[2], ARGV[3]
-- @include clock
-- @include number
-- @include bucket
-- @include despite_full

despite_full(shard)
local mark = redis.call('HGET', applied, inc)
if mark then
  -- The same process may have had the number before, but then it has published under it.
  return mark == '0 ' .. nonce and 1 or 0
end
if redis.call('SISMEMBER', dead, inc) == 1 then
  return 0
end
if not bits_of(shard) then
  redis.call('HSET', shard, 'bucket_bits', bucket_bits, 'swept_ms', string.format('%d', now_ms()))
end
redis.call('HSET', applied, inc, '0 ' .. nonce)
return 1
