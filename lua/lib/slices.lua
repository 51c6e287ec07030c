-- Predictions age in slices of time, four per lifetime; a letter names the slice that an entry was
-- last used in, in upper case until a first token confirms the entry. slice_reader(predictions, slice_ms, now): the current slice's letter, and a
-- function that says whether a letter's entries have expired. Wherever they are, expired entries
-- must be pruned within 20 slices, before the letter comes round again.
local function slice_reader(predictions, slice_ms, now)
  local present = math.floor(now / slice_ms)
  local cutoff = tonumber(redis.call('HGET', predictions, 'cutoff') or '') or 0
  local function is_over(letter)
    local age = (present - (string.byte(string.lower(letter)) - 97)) % 26
    return age > 4 or present - age < cutoff
  end
  return string.char(97 + present % 26), is_over
end
