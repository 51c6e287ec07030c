-- prune: removes expired predictions, in one bounded step of an endless cycle.
--
-- KEYS[1] applied      hash    inc -> "<seq> <nonce>"; an incarnation not in it has ended
-- KEYS[2] predictions  hash    slice letter -> entries; cutoff; bucket_bits; cursor
-- KEYS[3] predicted:   hashes  bucket -> sequence hash -> "<inc><slice letter>..."
-- ARGV[1] slice_ms     int     > 0, a quarter of an entry's lifetime
-- ARGV[2] max_buckets  int     searched in this step
-- Returns  {removed, buckets}   entries removed; buckets in a full round, 0 if nothing has been
--                             predicted yet
-- Cost     O(max_buckets * entries per bucket). Writes. Safe to retry.
local applied, predictions, predicted_prefix = KEYS[1], KEYS[2], KEYS[3]
local slice_ms, max_buckets = tonumber(ARGV[1]), tonumber(ARGV[2])
-- @include clock
-- @include number
-- @include bucket
-- @include slices
-- @include despite_full

despite_full(predictions)
local now = now_ms()
local present = math.floor(now / slice_ms)
for _, field in ipairs(redis.call('HKEYS', predictions)) do
  -- After 20 slices nothing is left of one (lua/lib/slices.lua), whatever its counter says.
  if #field == 1 and (present - (string.byte(field) - 97)) % 26 > 20 then
    redis.call('HDEL', predictions, field)
  end
end
-- The clock may have stepped back, as in a failover.
if (tonumber(redis.call('HGET', predictions, 'cutoff') or '') or 0) > present then
  redis.call('HDEL', predictions, 'cutoff')
end
local bits = bits_of(predictions)
if not bits then
  return {0, 0}
end
local _, is_over = slice_reader(predictions, slice_ms, now)
local is_writer = {}
for _, inc in ipairs(redis.call('HKEYS', applied)) do
  is_writer[inc] = true
end

local removed, total = {}, 0
local function living(owners)
  return (string.gsub(owners, '(%d+)(%a)', function(inc, slice)
    if is_writer[inc] and not is_over(slice) then
      return nil
    end
    local letter = string.lower(slice)
    removed[letter] = (removed[letter] or 0) + 1
    total = total + 1
    return ''
  end))
end

local count = 2 ^ bits
local first = whole(redis.call('HGET', predictions, 'cursor'), count - 1) or 0
local stop = math.min(first + max_buckets, count)
for bucket = first, stop - 1 do
  local key = predicted_prefix .. bucket_at(bits, bucket)
  local entries = redis.call('HGETALL', key)
  for i = 1, #entries, 2 do
    local owners = living(entries[i + 1])
    if owners == '' then
      redis.call('HDEL', key, entries[i])
    elseif owners ~= entries[i + 1] then
      redis.call('HSET', key, entries[i], owners)
    end
  end
end
for slice, entries in pairs(removed) do
  redis.call('HINCRBY', predictions, slice, -entries)
end
redis.call('HSET', predictions, 'cursor', string.format('%d', stop))
return {total, count}
