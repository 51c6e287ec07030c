-- read_meta(meta): its block_size, shards and workers_ms; nothing, if it does not say all of them.
-- Wants lib: number.
local function read_meta(meta)
  local texts = redis.call('HMGET', meta, 'block_size', 'shards', 'workers_ms')
  local block_size, shards, workers_ms = whole(texts[1], 1e9), whole(texts[2], 1024),
    whole(texts[3], 1e15)
  if block_size and shards and workers_ms and block_size > 0 and shards > 0 then
    return block_size, shards, workers_ms
  end
end
