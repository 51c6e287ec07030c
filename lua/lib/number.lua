-- whole(text, most): the number from 0 to `most` that `text` spells in digits, or nil.
local function whole(text, most)
  local number = string.find(text or '', '^%d+$') and tonumber(text)
  return number and number <= most and number or nil
end
