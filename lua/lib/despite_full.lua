-- despite_full(hash): lets a script write on when memory is full. Redis refuses a script's first
-- write then, if it is one that may take memory, but none behind a write that only frees some.
-- For what frees memory in the end, or is little, bounded and there for a while.
local function despite_full(hash)
  redis.pcall('HDEL', hash, '')
end
