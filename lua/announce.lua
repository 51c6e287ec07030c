-- announce: announces that workers of a namespace serve models and adapters of these names. Any number
-- of namespaces may claim a name, in the order of their first announcement; one that has not announced
-- it for some time comes after all others. Routers decide which one gets a name's requests.
--
-- KEYS[1] models     hash   model or adapter -> "<namespace> <last announced, s>" of each that claims it
-- ARGV[1] namespace  str
-- ARGV[2] gone_s     int    > 0; after so long a namespace's claim comes after all others
-- ARGV[3] kept_s     int    > 0; after so long it is forgotten
-- ARGV[4] most       int    names that are kept, of all namespaces together
-- ARGV[5] most_each  int    namespaces that may claim one name
-- ARGV[6...]         str    names
-- Returns  {name, namespace, ...}   those that another namespace claimed first; '': this claim is not
--                                   kept, as there are too many names, or namespaces for one
-- Cost     O(names * their namespaces). Writes. Safe to retry.
local models = KEYS[1]
local namespace, gone_s, kept_s = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local most, most_each = tonumber(ARGV[4]), tonumber(ARGV[5])
-- @include clock

local now_s = math.floor(now_ms() / 1000)

-- Whether a name is known, the claims of others, the earlier first, those that are gone, and whether
-- there is one of `namespace` among the first, at which place.
local function claims_on(name)
  local text = redis.call('HGET', models, name)
  local others, gone, place = {}, {}, nil
  for holder, at_s in string.gmatch(text or '', '(%S+) (%d+)') do
    local age_s = now_s - tonumber(at_s)
    if holder == namespace then
      place = age_s < gone_s and #others + 1 or nil
    elseif age_s < gone_s then
      others[#others + 1] = holder .. ' ' .. at_s
    elseif age_s <= kept_s then
      gone[#gone + 1] = holder .. ' ' .. at_s
    end
  end
  return text, others, gone, place
end

local count = redis.pcall('HLEN', models)
if type(count) ~= 'number' then
  -- Somebody made it another type of key. Nothing else would mend what all namespaces share.
  redis.call('DEL', models)
  count = 0
end
-- A few at random each time, so all of them in the end.
for _, name in ipairs(redis.call('HRANDFIELD', models, 16)) do
  local newest_s = 0
  for at_s in string.gmatch(redis.call('HGET', models, name), '%S+ (%d+)') do
    newest_s = math.max(newest_s, tonumber(at_s))
  end
  if now_s - newest_s > kept_s then
    redis.call('HDEL', models, name)
    count = count - 1
  end
end
local late = {}
for i = 6, #ARGV do
  local name = ARGV[i]
  local known, others, gone, place = claims_on(name)
  if (not known and count >= most) or (not place and #others >= most_each) then
    late[#late + 1], late[#late + 2] = name, ''
  else
    local first = others[1]
    if first and place ~= 1 then
      late[#late + 1], late[#late + 2] = name, string.match(first, '^%S+')
    end
    table.insert(others, place or #others + 1, string.format('%s %d', namespace, now_s))
    for _, claim in ipairs(gone) do
      if #others < most_each then
        others[#others + 1] = claim
      end
    end
    redis.call('HSET', models, name, table.concat(others, ' '))
    count = count + (known and 0 or 1)
  end
end
redis.call('PEXPIRE', models, kept_s * 1000)
return late
