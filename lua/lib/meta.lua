-- read_meta(meta): its block_size, shards, workers_ms and mixed_ms, which are 0 if they cannot be read;
-- nothing if one of the others cannot.
-- other_version(meta, workers, mine): returns the namespace's version of the data model if that is not
-- `mine`. If Redis has lost that of `meta`, the workers' entries say it: one that is `mine` will do, one
-- without a version is of the first. If none says it, returns nothing.
-- Wants lib: number.
local function read_meta(meta)
  local texts = redis.call('HMGET', meta, 'block_size', 'shards', 'workers_ms', 'mixed_ms')
  local block_size, shards = whole(texts[1], 1e9), whole(texts[2], 1024)
  if block_size and shards and block_size > 0 and shards > 0 then
    return block_size, shards, whole(texts[3], 1e15) or 0, whole(texts[4], 1e15) or 0
  end
end

local function other_version(meta, workers, mine)
  local held = whole(redis.call('HGET', meta, 'version'), 1e6)
  if held then
    return held ~= mine and held
  end
  for _, text in ipairs(redis.call('HVALS', workers)) do
    local is_json, info = pcall(cjson.decode, text)
    if is_json and type(info) == 'table' then
      held = tonumber(info.version) or 1
      if held == mine then
        return
      end
    end
  end
  return held
end
