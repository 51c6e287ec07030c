-- audit: count the blocks that an incarnation published but the index does not show.
--
-- KEYS[1] shard    hash    bucket_bits
-- KEYS[2] applied  hash    inc -> "<seq> <nonce>" of its last batch
-- KEYS[3] blocks:  hashes  bucket -> sequence hash -> owners
-- ARGV[1] inc      int
-- ARGV[2] nonce    str     as registered
-- ARGV[3] seq      int     of the last batch sent
-- ARGV[4...] group str     as for apply, with the tier that was published
-- Returns  how many of the blocks are missing or in another tier
--          -1              the incarnation is lost
-- Cost     O(blocks). Reads only.
local shard, applied, blocks_prefix = KEYS[1], KEYS[2], KEYS[3]
local inc, nonce, seq = ARGV[1], ARGV[2], ARGV[3]
-- @include number
-- @include bucket

local bits = bits_of(shard)
if not bits or redis.call('HGET', applied, inc) ~= seq .. ' ' .. nonce then
  return -1
end
local bucket_of = bucket_finder(bits, blocks_prefix)
local missing = 0
for i = 4, #ARGV do
  local group = ARGV[i]
  local key = bucket_of(group, 1)
  for at = 17, #group, 17 do
    local tier, hash = string.sub(group, at, at), string.sub(group, at + 1, at + 16)
    local owners = redis.pcall('HGET', key, hash)
    -- Plain text is found in a hundredth of the time, and lies where the pattern may match first.
    local at = type(owners) == 'string' and string.find(owners, inc .. tier, 1, true)
    if not (at and string.find(owners, '%f[%d]' .. inc .. tier, at)) then
      missing = missing + 1
    end
  end
end
return missing
