-- keep_kind(key, kind): drops a key that somebody made into something else.
local function keep_kind(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= 'none' and found ~= kind then
    redis.call('DEL', key)
  end
end
