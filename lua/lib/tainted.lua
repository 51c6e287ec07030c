-- Engines that may hold KV of one prompt as another's: nothing goes there before they have begun anew,
-- or dropped what they hold. The mark is kept by worker, so it outlives an incarnation.
-- process_of(life): of a life of an engine, as its worker registers it, the part that is the same
-- until its process begins anew; '' if that is not known.
-- life_in(info): that which a worker's registration, JSON, tells; '' if it does not.
-- is_later(life, marked): whether the engine has begun anew, or dropped what it holds, since. An agent
-- that was restarted does not know what its engine has dropped, and tells the process alone.
-- keep_tainted(worker, info, says_so, now): whether it is marked, and still in the life that it was
-- marked in. says_so: its agent has been told so, and outlives a loss of data.
-- Wants locals: failures.
local function process_of(life)
  return string.match(life, '^[^+]*')
end

local function life_in(info)
  local _, told = pcall(cjson.decode, info or nil)
  return type(told) == 'table' and type(told.engine_life) == 'string' and told.engine_life or ''
end

local function is_later(life, marked)
  return life ~= '' and life ~= marked
    and (process_of(life) ~= process_of(marked) or life ~= process_of(life))
end

local function keep_tainted(worker, info, says_so, now)
  local field = 'tainted ' .. worker
  local mark = redis.call('HGET', failures, field)
  if not mark and not says_so then
    return false
  end
  local life = life_in(info)
  if not mark then
    redis.call('HSET', failures, field, string.format('%d %s', now, life))
  elseif is_later(life, string.match(mark, '^%d+ ?(.*)$')) then
    redis.call('HDEL', failures, field)
    return false
  end
  return true
end
