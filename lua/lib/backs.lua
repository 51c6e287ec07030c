-- backs_of(group): where engines resume, as a group's string says it by number of its block; and the
-- length of the text before that.
-- backs_in(field): where engines resume, as a field says it, without the space behind; '' if nothing.
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
