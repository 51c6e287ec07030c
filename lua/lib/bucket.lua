-- bucket_namer(bits): a function from the hash of a group's first block, in hex, to the name of its
-- bucket: the digits that hold the hash's top `bits` bits, the rest of the last one taken as 0. And
-- bucket_at(bits, n), the name of the n-th bucket, counted from 0.
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
