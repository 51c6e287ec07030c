-- bits_of(shard): the shard's bucket_bits; nil if they are missing or make no sense: then the shard
-- is empty, or cannot be read until somebody opens it again.
-- bucket_namer(bits): a function from the hash of a group's first block, in hex, to the name of its
-- bucket: the digits that hold the hash's top `bits` bits, the rest of the last digit set to 0.
-- bucket_at(bits, n): the name of the n-th bucket, counted from 0.
-- Wants lib: number.
local function bits_of(shard)
  local bits = whole(redis.call('HGET', shard, 'bucket_bits'), 24)
  return bits ~= 0 and bits or nil
end

local function bucket_namer(bits)
  local digits = math.ceil(bits / 4)
  local rounded = ({[3] = '0022446688aaccee', [2] = '000044448888cccc', [1] = '0000000088888888'})
    [bits % 4]
  if not rounded then
    return function(hash)
      return string.sub(hash, 1, digits)
    end
  end
  return function(hash)
    local last = tonumber(string.sub(hash, digits, digits), 16) + 1
    return string.sub(hash, 1, digits - 1) .. string.sub(rounded, last, last)
  end
end

local function bucket_at(bits, n)
  local digits = math.ceil(bits / 4)
  return string.format('%0' .. digits .. 'x', n * 2 ^ (4 * digits - bits))
end
