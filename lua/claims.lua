-- claims: what the index shows of an incarnation, in some of its buckets.
--
-- KEYS[1] shard        hash    bucket_bits
-- KEYS[2] blocks:      hashes  bucket -> sequence hash -> owners
-- ARGV[1] inc          int
-- ARGV[2] first        int     >= 0, the bucket to begin at, by number; past the last one: 0
-- ARGV[3] max_buckets  int     > 0
-- Returns  {bits, next, {bucket, entry, ...}}   bits: bucket_bits; next: where to go on, 0 after the
--                              last one; bucket: its number; entry: tier (d h k), then the field,
--                              which is a sequence hash of 16 hex digits unless somebody spoilt it
--          nil                 the shard is empty
-- Cost     O(max_buckets * blocks per bucket). Reads only.
local shard, blocks_prefix = KEYS[1], KEYS[2]
local inc, first, max_buckets = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
-- @include number
-- @include bucket

local bits = bits_of(shard)
if not bits then
  return false
end
local count = 2 ^ bits
if first >= count then
  first = 0
end
-- With zeros before it, it counts for readers all the same.
local own_entry = '%f[%d]0*' .. inc .. '(%a)'
local stop = math.min(first + max_buckets, count)
local found = {}
for bucket = first, stop - 1 do
  local entries = redis.pcall('HGETALL', blocks_prefix .. bucket_at(bits, bucket))
  for i = 1, #entries, 2 do
    for tier in string.gmatch(entries[i + 1], own_entry) do
      found[#found + 1] = bucket
      found[#found + 1] = tier .. entries[i]
    end
  end
end
return {bits, stop % count, found}
