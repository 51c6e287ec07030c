-- backs_of(group): what a group's string says of where engines go on, by the number of the block in
-- it; and the length of what comes before that.
-- backs_in(field): what a field says of it, without the space behind it; '' if it says nothing.
local function backs_of(group)
  local space = string.find(group, ' ', 1, true)
  if not space then
    return {}, #group
  end
  local backs = {}
  for number, back in string.gmatch(string.sub(group, space), '(%d+)([-=]%d+)') do
    backs[tonumber(number)] = back
  end
  return backs, space - 1
end

local function backs_in(field)
  local space = string.find(field, ' ', 1, true)
  return space and string.sub(field, 1, space - 1) or ''
end
