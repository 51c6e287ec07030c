-- read_meta(meta): its block_size, shards and workers_ms, which is 0 if it cannot be read; nothing
-- if one of the others cannot.
-- Wants lib: number.
local function read_meta(meta)
  local texts = redis.call('HMGET', meta, 'block_size', 'shards', 'workers_ms')
  local block_size, shards = whole(texts[1], 1e9), whole(texts[2], 1024)
  if block_size and shards and block_size > 0 and shards > 0 then
    return block_size, shards, whole(texts[3], 1e15) or 0
  end
end
