-- drop_buckets: remove buckets that no reader will look for, because bucket_bits have changed since
-- or somebody renamed the buckets.
--
-- KEYS[1] shard        hash    bucket_bits
-- KEYS[2] predictions  hash    bucket_bits
-- KEYS[3] blocks:      hashes  bucket -> sequence hash -> owners
-- KEYS[4] predicted:   hashes  bucket -> sequence hash -> "<inc><slice letter>..."
-- ARGV[1...] name      str     "blocks:<bucket>" or "predicted:<bucket>", as found
-- Returns  how many were removed
-- Cost     O(names + blocks in what is removed). Writes. Safe to retry.
local shard, predictions, blocks_prefix, predicted_prefix = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
-- @include number
-- @include bucket

local function dropper(bits, prefix)
  local bucket_of = bits and bucket_finder(bits, '')
  return function(bucket)
    -- Without bits nobody reads any bucket, but the bits may come back.
    if not bits or (string.find(bucket, '^%x+$') and bucket == string.lower(bucket)
      and #bucket == math.ceil(bits / 4) and bucket_of(bucket, 1) == bucket) then
      return 0
    end
    return redis.call('DEL', prefix .. bucket)
  end
end

local drop = {
  blocks = dropper(bits_of(shard), blocks_prefix),
  predicted = dropper(bits_of(predictions), predicted_prefix),
}
local dropped = 0
for _, name in ipairs(ARGV) do
  local family, bucket = string.match(name, '^(%a+):(.*)$')
  dropped = dropped + drop[family](bucket)
end
return dropped
