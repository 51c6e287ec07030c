-- predicted: returns how much of a chain each worker will hold, judging by what was routed to it.
--
-- KEYS[1] dead         set     inc whose entries may still be present
-- KEYS[2] predictions  hash    cutoff, bucket_bits
-- KEYS[3] predicted:   hashes  bucket -> sequence hash -> "<inc><slice letter>..."
-- ARGV[1] blocks       str     sequence hashes from the root outward, 16 hex digits each, at the
--                              positions that predict is given
-- ARGV[2] slice_ms     int     > 0, a quarter of an entry's lifetime
-- Returns  {inc, n, ...}   inc will hold the first n blocks
-- Cost     O(workers that lead * log blocks). Reads only.
local dead, predictions, predicted_prefix = KEYS[1], KEYS[2], KEYS[3]
local blocks, slice_ms = ARGV[1], tonumber(ARGV[2])
-- @include clock
-- @include number
-- @include bucket
-- @include slices

local bits = bits_of(predictions)
if not bits or blocks == '' then
  return {}
end
local bucket_of = bucket_finder(bits, predicted_prefix)
local _, is_over = slice_reader(predictions, slice_ms, now_ms())

-- By the owners as stored: the blocks of a prefix that all workers have are often the same.
local parsed = {}
local function parse(owners)
  if not parsed[owners] then
    local found = {}
    for inc, slice in string.gmatch(owners, '(%d+)(%a)') do
      found[inc] = not is_over(slice) or nil
    end
    parsed[owners] = found
  end
  return parsed[owners]
end

local seen = {}
local function holders(position)
  if not seen[position] then
    local at = position * 16 - 15
    local owners = redis.pcall('HGET', bucket_of(blocks, at), string.sub(blocks, at, at + 15))
    seen[position] = parse(type(owners) == 'string' and owners or '')
  end
  return seen[position]
end

local is_gone = {}
for _, inc in ipairs(redis.call('SMEMBERS', dead)) do
  is_gone[inc] = true
end
local answer = {}
for inc in pairs(holders(1)) do
  if whole(inc, 1e15) and not is_gone[inc] then
    -- Held up to `low`; not at `high`.
    local low, high = 1, #blocks / 16 + 1
    while high - low > 1 do
      local middle = math.floor((low + high) / 2)
      if holders(middle)[inc] then
        low = middle
      else
        high = middle
      end
    end
    answer[#answer + 1] = inc
    answer[#answer + 1] = low
  end
end
return answer
