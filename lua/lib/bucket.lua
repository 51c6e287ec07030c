-- bits_of(shard): the shard's bucket_bits; nil if they are missing or make no sense: then the shard
-- is empty, or cannot be read until somebody opens it again.
-- bucket_finder(bits, prefix): a function(text, at) that names a group's bucket: `prefix`, then of
-- the hash of the group's first block, which is in hex at position `at` of `text`, the digits that
-- hold the top `bits` bits, the rest of the last digit set to 0. It makes few strings on the way,
-- as each takes a twentieth of a probe.
-- bucket_at(bits, n): the name of the n-th bucket, counted from 0.
-- Wants lib: number.
local function bits_of(shard)
  local bits = whole(redis.call('HGET', shard, 'bucket_bits'), 24)
  return bits ~= 0 and bits or nil
end

local function bucket_finder(bits, prefix)
  local sub, byte = string.sub, string.byte
  local digits = math.ceil(bits / 4)
  local rounded = ({[3] = '0022446688aaccee', [2] = '000044448888cccc', [1] = '0000000088888888'})
    [bits % 4]
  if not rounded then
    return function(text, at)
      return prefix .. sub(text, at, at + digits - 1)
    end
  end
  return function(text, at)
    local last = byte(text, at + digits - 1)
    last = last - (last < 58 and 47 or 86)
    return prefix .. sub(text, at, at + digits - 2) .. sub(rounded, last, last)
  end
end

local function bucket_at(bits, n)
  local digits = math.ceil(bits / 4)
  return string.format('%0' .. digits .. 'x', n * 2 ^ (4 * digits - bits))
end
