-- Engines that may hold KV of one prompt as another's: nothing goes there before they have begun anew,
-- or dropped what they hold.
-- process_of(life): of a life of an engine, as its worker registers it, the part that is the same
-- until its process begins anew; '' if that is not known.
-- life_in(info): that which a worker's registration, JSON, tells; '' if it does not.
-- is_later(life, marked): whether the engine has begun anew, or dropped what it holds, since. An agent
-- that was restarted does not know what its engine has dropped, and tells the process alone.
-- keep_tainted(marks, info, says_so, now): whether it is marked, and still in the life that it was
-- marked in. says_so: its agent has been told so, and outlives a loss of data.
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

local function keep_tainted(marks, info, says_so, now)
  local mark, life = marks.tainted, life_in(info)
  if mark and is_later(life, tostring(mark.life or '')) then
    marks.tainted = nil
  elseif not mark and says_so then
    marks.tainted = {since_ms = now, life = life}
  end
  return marks.tainted ~= nil
end
