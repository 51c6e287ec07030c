-- withdraw_predicted: forgets what was predicted for a request that ended before its first token:
-- entries that it was the first to add and that no other request has confirmed since.
--
-- KEYS[1] predictions  hash    slice letter -> entries; bucket_bits
-- KEYS[2] predicted:   hashes  bucket -> sequence hash -> "<inc><slice letter>..."
-- KEYS[3] routed:      hashes  attempt -> what was predicted for it
-- ARGV[1] attempt      str     of the request's reservation
-- Returns  how many entries were removed
-- Cost     O(blocks). Writes. Safe to retry.
local predictions, predicted_prefix, routed_prefix = KEYS[1], KEYS[2], KEYS[3]
local attempt = ARGV[1]
-- @include number
-- @include bucket

local inc, added = unpack(redis.call('HMGET', routed_prefix .. attempt, 'inc', 'added'))
redis.call('DEL', routed_prefix .. attempt)
local bits = bits_of(predictions)
if not inc or not added or not bits then
  return 0
end
local bucket_of = bucket_finder(bits, predicted_prefix)
local own_unconfirmed = '%f[%d]' .. inc .. '(%u)'
local count = 0
for at = 1, #added, 16 do
  local hash = string.sub(added, at, at + 15)
  local key = bucket_of(added, at)
  local owners = redis.call('HGET', key, hash) or ''
  local from, to, slice = string.find(owners, own_unconfirmed)
  if slice then
    owners = string.sub(owners, 1, from - 1) .. string.sub(owners, to + 1)
    if owners == '' then
      redis.call('HDEL', key, hash)
    else
      redis.call('HSET', key, hash, owners)
    end
    redis.call('HINCRBY', predictions, string.lower(slice), -1)
    count = count + 1
  end
end
return count
