-- despite_full(hash): lets a script go on writing when memory is full. Redis then refuses a
-- script's first write if that write may take memory, but none after a write that only frees
-- memory. For scripts that free memory in the end, or whose writes are small, bounded and
-- temporary.
local function despite_full(hash)
  redis.pcall('HDEL', hash, '')
end
