-- rows(from, names): returns the records in ARGV from there on, each with a text by each of `names`.
local function rows(from, names)
  local records = {}
  for i = from, #ARGV, #names do
    local row = {}
    for j, name in ipairs(names) do
      row[name] = ARGV[i + j - 1]
    end
    records[#records + 1] = row
  end
  return records
end
