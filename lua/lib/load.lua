-- A worker's load: the numbers that app/core/loads.py names, in its order, as one text.
-- no_load(): of a worker on which nothing was ever reserved.
-- parse_load(text): nil if it cannot be read.
local LOAD = {} -- @fields load
local LOAD_TEXT = '^(%d+)' .. string.rep(' (%d+)', #LOAD - 1) .. '$'

local function no_load()
  local l = {}
  for _, name in ipairs(LOAD) do
    l[name] = 0
  end
  return l
end

local function parse_load(text)
  local numbers, l = {string.match(text or '', LOAD_TEXT)}, {}
  for i, name in ipairs(LOAD) do
    local number = tonumber(numbers[i])
    if not number or number >= 1e15 then
      return nil
    end
    l[name] = number
  end
  return l
end

local function format_load(l)
  local numbers = {}
  for i, name in ipairs(LOAD) do
    numbers[i] = string.format('%d', l[name])
  end
  return table.concat(numbers, ' ')
end
