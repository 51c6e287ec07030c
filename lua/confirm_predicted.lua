-- confirm_predicted: confirms predictions for a request, as its first token is out: its worker holds
-- the blocks.
--
-- KEYS[1] applied      hash    inc -> "<seq> <nonce>"; an incarnation not in it has ended
-- KEYS[2] predictions  hash    slice letter -> entries; cutoff; bucket_bits; cursor
-- KEYS[3] predicted:   hashes  bucket -> sequence hash -> "<inc><slice letter>..."
-- KEYS[4] routed:      hashes  attempt -> what was predicted for it
-- ARGV[1] attempt      str     of the request's reservation
-- ARGV[2] slice_ms     int     > 0, a quarter of an entry's lifetime
-- Returns  how many entries were created, refreshed or confirmed
-- Cost     O(blocks). Writes. Safe to retry.
local applied, predictions, predicted_prefix, routed_prefix = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local attempt, slice_ms = ARGV[1], tonumber(ARGV[2])
-- @include clock
-- @include number
-- @include bucket
-- @include slices

local inc, blocks = unpack(redis.call('HMGET', routed_prefix .. attempt, 'inc', 'blocks'))
redis.call('DEL', routed_prefix .. attempt)
local bits = bits_of(predictions)
if not inc or not blocks or not bits or redis.call('HEXISTS', applied, inc) == 0 then
  return 0
end
local bucket_of = bucket_finder(bits, predicted_prefix)
local present, is_over = slice_reader(predictions, slice_ms, now_ms())
-- @include put_predictions
return (put_predictions(inc, blocks, true))
