-- claim: gives an agent process its share of the engines of a source, until its lease ends. Each engine
-- has one agent at a time. Engines of a process that is gone are free at once, and so are those that a
-- process has beyond its share.
--
-- An engine that is not ready may still be claimed if it has been claimed before.
--
-- A process that comes too late, as all do after Redis was away, renews the leases of the others that
-- were there when it last came: else the first to come would take over all engines.
--
-- KEYS[1] agents:     hashes  source -> "agent <holder>" -> until when, ms; "engine <engine>" -> holder
-- ARGV[1] source      str
-- ARGV[2] holder      str     the process
-- ARGV[3] ttl_ms      n       how long from now; 0: it leaves
-- ARGV[4] room        n       of how many it can be the agent
-- ARGV[5] num_ready   n       so many of the engines that follow are ready, the first ones
-- ARGV[6...] engine   str     all that it sees
-- Returns  {{engine, ...}, {engine, ...}}   those of which it is the agent; of those that may be claimed
--                              the ones that have none
-- Cost     O(engines + processes). Writes. Safe to retry.
local key = KEYS[1] .. ARGV[1]
local holder, ttl_ms, room, num_ready = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
-- @include clock
-- @include number
-- @include despite_full

local LONGEST_MS, KEPT_MS = 3600 * 1000, 24 * 3600 * 1000
despite_full(key)
local now = now_ms()
local own_ms = whole(redis.call('HGET', key, 'agent ' .. holder), now)
if ttl_ms > 0 then
  redis.call('HSET', key, 'agent ' .. holder, string.format('%d', now + ttl_ms))
else
  redis.call('HDEL', key, 'agent ' .. holder)
end

-- One that ends with its own is what this process gave, and is given once.
local function lease_ms(name, text)
  local ends_ms = whole(text, now + LONGEST_MS) or 0
  if ttl_ms > 0 and own_ms and ends_ms <= now and ends_ms > own_ms - ttl_ms and ends_ms ~= own_ms then
    ends_ms = now + ttl_ms
    redis.call('HSET', key, 'agent ' .. name, string.format('%d', ends_ms))
  end
  return ends_ms
end

local seen, is_live, num_live, holder_of = {}, {}, 0, {}
for i = 6, #ARGV do
  seen[ARGV[i]] = true
end
local fields = redis.call('HGETALL', key)
for i = 1, #fields, 2 do
  local kind, name = string.match(fields[i], '^(%a+) (.*)$')
  if kind == 'agent' and lease_ms(name, fields[i + 1]) > now then
    is_live[name], num_live = true, num_live + 1
  elseif kind == 'engine' then
    holder_of[name] = fields[i + 1]
  else
    redis.call('HDEL', key, fields[i])
  end
end
for engine, by in pairs(holder_of) do
  if not seen[engine] and (by == holder or not is_live[by]) then
    redis.call('HDEL', key, 'engine ' .. engine)
  end
end

local function claimable(i)
  return holder_of[ARGV[i]] or i - 5 <= num_ready
end
local num_engines = 0
for i = 6, #ARGV do
  num_engines = num_engines + (claimable(i) and 1 or 0)
end
local share = ttl_ms > 0 and math.min(room, math.ceil(num_engines / math.max(1, num_live))) or 0
local claimed = {}
for i = 6, #ARGV do
  if holder_of[ARGV[i]] == holder then
    if #claimed < share then
      claimed[#claimed + 1] = ARGV[i]
    else
      redis.call('HSET', key, 'engine ' .. ARGV[i], '')
    end
  end
end
local free = {}
for i = 6, #ARGV do
  if claimable(i) and holder_of[ARGV[i]] ~= holder and not is_live[holder_of[ARGV[i]] or ''] then
    if #claimed < share then
      redis.call('HSET', key, 'engine ' .. ARGV[i], holder)
      claimed[#claimed + 1] = ARGV[i]
    else
      free[#free + 1] = ARGV[i]
    end
  end
end
redis.call('PEXPIRE', key, KEPT_MS)
return {claimed, free}
