-- keep_kind(key, kind): drops the key if somebody has turned it into another type.
local function keep_kind(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= 'none' and found ~= kind then
    redis.call('DEL', key)
  end
end
