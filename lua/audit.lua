-- audit: compares what the index shows of an incarnation with what it published.
--
-- KEYS[1] shard        hash    bucket_bits
-- KEYS[2] applied      hash    inc -> "<seq> <nonce>" of its last batch
-- KEYS[3] blocks:      hashes  bucket -> sequence hash -> owners, after where engines go on
-- ARGV[1] inc          int
-- ARGV[2] nonce        str     as registered
-- ARGV[3] seq          int     of the last batch sent
-- ARGV[4] first        int     >= 0, number of the bucket to begin at; past the last one: 0
-- ARGV[5] within       int     >= 0, where in that bucket, as the previous reply said; else 0
-- ARGV[6] max_buckets  int     the reply ends earlier in a bucket that is too large
-- ARGV[7...] group     str     as for apply, with what was published
-- Returns  {missing, bits, next, within, {bucket, entry, ...}}   missing: how many blocks of these
--                              groups are not shown, or as something else; then what is shown in
--                              some buckets. bits: bucket_bits; next, within: where to continue, 0
--                              after the last bucket; bucket: its number; entry: tier (d h k),
--                              then the sequence hash, 16 hex digits
--          nil                 the incarnation is lost
-- Cost     O(blocks + max_buckets * blocks per bucket, at most 1,000 of each). Reads only.
local shard, applied, blocks_prefix = KEYS[1], KEYS[2], KEYS[3]
local inc, nonce, seq = ARGV[1], ARGV[2], ARGV[3]
local bucket, within, max_buckets = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
-- @include number
-- @include bucket
-- @include backs

local bits = bits_of(shard)
if not bits or redis.call('HGET', applied, inc) ~= seq .. ' ' .. nonce then
  return false
end

-- The tiers that owners show for `inc`. Plain text is found in a hundredth of the time that the
-- pattern takes, and a thousand workers may hold a block.
local function tiers_in(owners)
  local at = owners and string.find(owners, inc, 1, true)
  return string.gmatch(at and owners or '', '%f[%d]' .. inc .. '(%a)')
end

local function back_in(owners)
  return owners and string.match(backs_in(owners), '%f[%d]' .. inc .. '([-=]%d+)')
end

local bucket_of = bucket_finder(bits, blocks_prefix)
local missing = 0
for i = 7, #ARGV do
  local group = ARGV[i]
  local key = bucket_of(group, 1)
  local backs, length = backs_of(group)
  for at = 17, length, 17 do
    local tier, hash = string.sub(group, at, at), string.sub(group, at + 1, at + 16)
    local owners = redis.call('HGET', key, hash)
    if tiers_in(owners)() ~= tier or back_in(owners) ~= backs[(at - 17) / 17 + 1] then
      missing = missing + 1
    end
  end
end

local count = 2 ^ bits
if bucket >= count then
  bucket, within = 0, 0
end
local shown = {}
local stop = math.min(bucket + max_buckets, count)
while bucket < stop do
  local found = redis.call('HSCAN', blocks_prefix .. bucket_at(bits, bucket), within, 'COUNT', 1000)
  local entries = found[2]
  for i = 1, #entries, 2 do
    for tier in tiers_in(entries[i + 1]) do
      shown[#shown + 1] = bucket
      shown[#shown + 1] = tier .. entries[i]
    end
  end
  within = tonumber(found[1])
  if within > 0 then
    break
  end
  bucket = bucket + 1
end
return {missing, bits, bucket % count, within, shown}
