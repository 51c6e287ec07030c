-- audit: what an incarnation published that the index does not show.
--
-- KEYS[1] shard    hash    bucket_bits
-- KEYS[2] applied  hash    inc -> "<seq> <nonce>" of its last batch
-- KEYS[3] blocks:  hashes  bucket -> sequence hash -> owners
-- ARGV[1] inc      int
-- ARGV[2] nonce    str     as registered
-- ARGV[3] seq      int     of the last batch sent
-- ARGV[4] entries  str     17 characters each: tier published (d h k), then the sequence hash
-- Returns  how many of the entries are missing or in another tier
--          -1              the incarnation is lost
-- Cost     O(entries). Reads only.
local shard, applied, blocks_prefix = KEYS[1], KEYS[2], KEYS[3]
local inc, nonce, seq, entries = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
-- @include bucket

local bits = redis.call('HGET', shard, 'bucket_bits')
if not bits or redis.call('HGET', applied, inc) ~= seq .. ' ' .. nonce then
  return -1
end
local bucket_name = bucket_namer(tonumber(bits))
local missing = 0
for at = 1, #entries, 17 do
  local tier, hash = string.sub(entries, at, at), string.sub(entries, at + 1, at + 16)
  local owners = redis.pcall('HGET', blocks_prefix .. bucket_name(hash), hash)
  if type(owners) ~= 'string' or not string.find(owners, '%f[%d]' .. inc .. tier) then
    missing = missing + 1
  end
end
return missing
