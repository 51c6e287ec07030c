-- announce: workers of a namespace serve models and adapters of these names. The first namespace to
-- announce a name has it, until it has announced it no more for some time.
--
-- KEYS[1] models     hash   model or adapter -> "<namespace> <last announced, s>"
-- ARGV[1] namespace  str
-- ARGV[2] gone_s     int    > 0; after so long another namespace may have a name
-- ARGV[3] kept_s     int    > 0; after so long it is forgotten
-- ARGV[4] most       int    names that are kept, of all namespaces together
-- ARGV[5...]         str    names
-- Returns  {name, namespace, ...}   those that another namespace has; '': there are too many names
-- Cost     O(names). Writes. Safe to retry.
local models = KEYS[1]
local namespace, gone_s, kept_s, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
-- @include clock

local now_s = math.floor(now_ms() / 1000)
-- Earlier releases kept a sorted set here.
local count = redis.pcall('HLEN', models)
if type(count) ~= 'number' then
  redis.call('DEL', models)
  count = 0
end
local function entry_of(name)
  local text = redis.call('HGET', models, name)
  local holder, at_s = string.match(text or '', '^(%S+) (%d+)$')
  return text, holder, now_s - (tonumber(at_s) or 0)
end

-- A few at random each time, so all of them in the end.
for _, name in ipairs(redis.call('HRANDFIELD', models, 16)) do
  local _, _, age_s = entry_of(name)
  if age_s > kept_s then
    redis.call('HDEL', models, name)
    count = count - 1
  end
end
local refused = {}
for i = 5, #ARGV do
  local name = ARGV[i]
  local entry, holder, age_s = entry_of(name)
  if holder and holder ~= namespace and age_s < gone_s then
    refused[#refused + 1], refused[#refused + 2] = name, holder
  elseif not entry and count >= most then
    refused[#refused + 1], refused[#refused + 2] = name, ''
  else
    redis.call('HSET', models, name, string.format('%s %d', namespace, now_s))
    count = count + (entry and 0 or 1)
  end
end
return refused
