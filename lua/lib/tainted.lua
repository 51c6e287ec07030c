-- Engines that may hold KV of one prompt as another's: nothing goes there before they have begun anew,
-- or dropped what they hold.
-- process_of(life): returns the part of an engine's life, as registered, that stays the same until its
-- process begins anew; '' if that is not known.
-- life_in(info): returns the life in a worker's registration, JSON; '' if it has none.
-- is_later(life, marked): whether the engine has begun anew, or dropped what it holds, since. A
-- restarted agent does not know what its engine has dropped, and tells the process alone.
-- keep_tainted(marks, info, says_so, now): whether a worker is marked, and in the life that it was
-- marked in. says_so: its agent, which outlives a loss of data, has been told.
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
