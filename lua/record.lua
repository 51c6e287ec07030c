-- record: append routed requests to the stream of recent ones.
--
-- KEYS[1] decisions  stream  one entry per routed request
-- ARGV[1] kept       int     > 0; about this many are kept
-- ARGV[2] width      int     fields per entry
-- ARGV[3...]         str     that many names, then as many values for each request
-- Returns  how many were appended
-- Cost     O(requests * width). Writes.
local decisions, kept, width = KEYS[1], ARGV[1], tonumber(ARGV[2])

local function append(entry)
  return redis.pcall('XADD', decisions, 'MAXLEN', '~', kept, '*', unpack(entry))
end

local appended = 0
for first = 3 + width, #ARGV, width do
  local entry = {}
  for i = 0, width - 1 do
    entry[#entry + 1] = ARGV[3 + i]
    entry[#entry + 1] = ARGV[first + i]
  end
  local id = append(entry)
  if type(id) == 'table' then
    if not (string.find(id.err, 'WRONGTYPE') or string.find(id.err, 'exhausted')) then
      return id
    end
    -- Somebody turned the key into something that takes no more entries.
    redis.call('UNLINK', decisions)
    append(entry)
  end
  appended = appended + 1
end
return appended
