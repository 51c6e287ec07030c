-- predict: record that a request went to a worker, which will therefore hold its blocks.
--
-- Only some blocks of each chain are recorded, chosen by their position alone; so an earlier one
-- was used at least as recently as a later one, and the slices along a chain never get younger.
--
-- KEYS[1] applied      hash    inc -> "<seq> <nonce>"; an incarnation not in it has ended
-- KEYS[2] predictions  hash    slice letter -> entries; cutoff; bucket_bits; cursor
-- KEYS[3] predicted:   hashes  bucket -> sequence hash -> "<inc><slice letter>..."
-- ARGV[1] inc          int     the chosen worker's
-- ARGV[2] blocks       str     sequence hashes from the root outward, 16 hex digits each
-- ARGV[3] slice_ms     int     > 0, a quarter of an entry's lifetime
-- ARGV[4] bucket_bits  int     1-24; counts only if nothing was predicted before
-- ARGV[5] max_entries  int     above this many, the oldest slices are given up ...
-- ARGV[6] target       int     ... until this many are left
-- Returns  how many entries were created or refreshed
-- Cost     O(blocks). Writes. Safe to retry.
local applied, predictions, predicted_prefix = KEYS[1], KEYS[2], KEYS[3]
local inc, blocks, slice_ms, bucket_bits = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local max_entries, target = tonumber(ARGV[5]), tonumber(ARGV[6])
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
local own_entry = '%f[%d]' .. inc .. '(%l)'

-- From the leaf inward: nothing before a block of the current slice is older.
local moved, count = {}, 0
for at = #blocks - 15, 1, -16 do
  local hash = string.sub(blocks, at, at + 15)
  local key = bucket_of(blocks, at)
  local owners = redis.call('HGET', key, hash) or ''
  local from, to, slice = string.find(owners, own_entry)
  if slice == present then
    break
  end
  if slice then
    owners = string.sub(owners, 1, from - 1) .. string.sub(owners, to + 1)
    moved[slice] = (moved[slice] or 0) + 1
  end
  redis.call('HSET', key, hash, owners .. inc .. present)
  count = count + 1
end
for slice, entries in pairs(moved) do
  redis.call('HINCRBY', predictions, slice, -entries)
end
redis.call('HINCRBY', predictions, present, count)

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
