-- predict: records that a request went to a worker, which will therefore hold its blocks.
--
-- Only some blocks of each chain are recorded, chosen by their position alone; so an earlier block was
-- used at least as recently as a later one, and slices never get younger along a chain.
--
-- KEYS[1] applied      hash    inc -> "<seq> <nonce>"; an incarnation not in it has ended
-- KEYS[2] predictions  hash    slice letter -> entries; cutoff; bucket_bits; cursor
-- KEYS[3] predicted:   hashes  bucket -> sequence hash -> "<inc><slice letter>..."
-- KEYS[4] routed:      hashes  attempt -> what is predicted for it
-- ARGV[1] inc          int     the chosen worker's
-- ARGV[2] blocks       str     sequence hashes from the root outward, 16 hex digits each
-- ARGV[3] slice_ms     int     > 0, a quarter of an entry's lifetime
-- ARGV[4] bucket_bits  int     1-24; counts only if nothing was predicted before
-- ARGV[5] max_entries  int     above this many, the oldest slices are given up ...
-- ARGV[6] target       int     ... until this many are left
-- ARGV[7] attempt      str     of the request's reservation, by which its first token confirms the
--                              prediction, or its end before that withdraws it ...
-- ARGV[8] ttl_ms       int     > 0; ... within this time
-- Returns  how many entries were created or refreshed
-- Cost     O(blocks). Writes. Safe to retry.
local applied, predictions, predicted_prefix, routed_prefix = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local inc, blocks, slice_ms, bucket_bits = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local max_entries, target = tonumber(ARGV[5]), tonumber(ARGV[6])
local attempt, ttl_ms = ARGV[7], tonumber(ARGV[8])
-- @include clock
-- @include number
-- @include bucket
-- @include slices

if redis.call('HEXISTS', applied, inc) == 0 then
  return 0
end
if not bits_of(predictions) then
  redis.call('HSET', predictions, 'bucket_bits', bucket_bits)
end
local bucket_of = bucket_finder(bits_of(predictions), predicted_prefix)
local now = now_ms()
local present, is_over = slice_reader(predictions, slice_ms, now)
-- The current slice is never given up: one that is full by itself takes no more entries.
if (tonumber(redis.call('HGET', predictions, present) or '') or 0) >= max_entries then
  return 0
end
-- @include put_predictions
local count, added = put_predictions(inc, blocks, false)
local routed = routed_prefix .. attempt
redis.call('HSET', routed, 'inc', inc, 'blocks', blocks, 'added', table.concat(added))
redis.call('PEXPIRE', routed, ttl_ms)

local entries, total = {}, 0
local counted = redis.call('HGETALL', predictions)
for i = 1, #counted, 2 do
  if #counted[i] == 1 and not is_over(counted[i]) then
    entries[counted[i]] = tonumber(counted[i + 1])
    total = total + entries[counted[i]]
  end
end
if total > max_entries then
  local newest = math.floor(now / slice_ms)
  local oldest = newest - 4
  while total > target and oldest < newest do
    total = total - (entries[string.char(97 + oldest % 26)] or 0)
    oldest = oldest + 1
  end
  redis.call('HSET', predictions, 'cutoff', string.format('%d', oldest))
end
return count
