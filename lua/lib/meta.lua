-- is_readable(meta): whether it says all that a namespace is made of.
local function is_readable(meta)
  for _, value in ipairs(redis.call('HMGET', meta, 'block_size', 'shards', 'created_ms')) do
    if not tonumber(value) then
      return false
    end
  end
  return true
end
