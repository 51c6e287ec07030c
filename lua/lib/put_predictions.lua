-- put_predictions(inc, blocks, is_confirmed): records that `inc` will hold `blocks`, or, confirmed, holds
-- them. Unconfirmed entries have their slice's letter in upper case; confirmed ones stay confirmed.
-- Returns how many entries it created or refreshed, and the hashes of those that it created.
-- Wants locals: predictions, bucket_of, present, is_over.
local function put_predictions(inc, blocks, is_confirmed)
  local own_entry = '%f[%d]' .. inc .. '(%a)'
  -- From the leaf inward: nothing before a confirmed block of the current slice is older.
  local gained, count, added = {}, 0, {}
  for at = #blocks - 15, 1, -16 do
    local hash = string.sub(blocks, at, at + 15)
    local key = bucket_of(blocks, at)
    local owners = redis.call('HGET', key, hash) or ''
    local from, to, slice = string.find(owners, own_entry)
    if slice == present then
      break
    end
    local lives = slice and not is_over(slice)
    local was_confirmed = lives and string.lower(slice) == slice
    local letter = (is_confirmed or was_confirmed) and present or string.upper(present)
    if slice ~= letter then
      if slice then
        owners = string.sub(owners, 1, from - 1) .. string.sub(owners, to + 1)
        local last = string.lower(slice)
        gained[last] = (gained[last] or 0) - 1
      end
      redis.call('HSET', key, hash, owners .. inc .. letter)
      count = count + 1
    end
    if not lives then
      added[#added + 1] = hash
    end
  end
  gained[present] = (gained[present] or 0) + count
  for slice, entries in pairs(gained) do
    redis.call('HINCRBY', predictions, slice, entries)
  end
  return count, added
end
