-- claims: what the index shows of an incarnation, in some of its buckets.
--
-- KEYS[1] shard        hash    bucket_bits
-- KEYS[2] blocks:      hashes  bucket -> sequence hash -> owners
-- ARGV[1] inc          int
-- ARGV[2] first        int     >= 0, number of the bucket to begin at; past the last one: 0
-- ARGV[3] within       int     >= 0, where in that bucket, as the previous reply said; else 0
-- ARGV[4] max_buckets  int     > 0; the reply ends earlier in a bucket that is too large
-- Returns  {bits, next, within, {bucket, entry, ...}}   bits: bucket_bits; next, within: where to
--                              continue, 0 after the last bucket; bucket: its number; entry: tier
--                              (d h k), then the field, which is a sequence hash of 16 hex digits
--                              unless somebody corrupted it
--          nil                 the shard is empty
-- Cost     O(max_buckets * blocks per bucket, at most 1,000 of each). Reads only.
local shard, blocks_prefix = KEYS[1], KEYS[2]
local inc, bucket, within = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local max_buckets = tonumber(ARGV[4])
-- @include number
-- @include bucket

local bits = bits_of(shard)
if not bits then
  return false
end
local count = 2 ^ bits
if bucket >= count then
  bucket, within = 0, 0
end
-- Readers also count entries with leading zeros.
local own_entry = '%f[%d]0*' .. inc .. '(%a)'
local claims = {}
local stop = math.min(bucket + max_buckets, count)
while bucket < stop do
  -- In a key of another type there is nothing to be found.
  local found = redis.pcall('HSCAN', blocks_prefix .. bucket_at(bits, bucket), within, 'COUNT', 1000)
  local entries = found[2] or {}
  for i = 1, #entries, 2 do
    -- Plain text is found in a hundredth of the time: a thousand workers may hold a block.
    local at = string.find(entries[i + 1], inc, 1, true)
    for tier in string.gmatch(at and entries[i + 1] or '', own_entry) do
      claims[#claims + 1] = bucket
      claims[#claims + 1] = tier .. entries[i]
    end
  end
  within = tonumber(found[1] or 0)
  if within > 0 then
    break
  end
  bucket = bucket + 1
end
return {bits, bucket % count, within, claims}
