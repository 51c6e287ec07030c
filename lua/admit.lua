-- admit: lets requests of limited keys in, as far as their limits go, and settles what ended requests
-- have used.
--
-- A bucket holds what may be used at once, and fills at the rate of its limit. It may be overdrawn: if
-- a request uses more than its estimate, or asks for more than a full bucket, later ones wait for it.
--
-- KEYS[1] limits:     hashes  key -> its buckets, and its requests under way at each replica
-- ARGV[1] replica     str   the process that asks; without spaces
-- ARGV[2] number      int   > 0; of this call of that replica, larger than those of earlier ones
-- ARGV[3] lease_ms    int   > 0; so long a replica's requests count without another call
-- ARGV[4] kept_ms     int   > 0; so long buckets are kept without another call
-- ARGV[5...] AdmitRow str   of app/state/records.py, one after another: key; asks, 1: to let a request
--                           in, 0: to settle one, or to say again what is held; held: requests of the
--                           key under way at the replica, without those that this call asks for;
--                           concurrent: how many may be under way at all replicas, 0: any number;
--                           requests, tokens, uncached: `<burst> <by the ms>` of a limit, '-': there
--                           is none; num_requests, num_tokens, num_uncached: to take, or if it settles
--                           to give back where they are negative; of what is to be taken of uncached,
--                           the share is left out that was cached lately; prompt_tokens and
--                           cached_tokens of them, 0 and 0: not known
-- Returns  {{outcome, number, requests, tokens, replicas}, ...}   of each row: outcome 1: let in, or
--                           settled; number is then what was taken of uncached. Else which limit
--                           refuses it, and in how many ms it may not. What is left of requests and
--                           tokens, -1: no limit; how many replicas have asked about the key lately,
--                           0: not looked for
-- Cost     O(rows * replicas). Writes.
local limits_prefix, replica, number = KEYS[1], ARGV[1], tonumber(ARGV[2])
local lease_ms, kept_ms = tonumber(ARGV[3]), tonumber(ARGV[4])
-- @include clock
-- @include number
-- @include rows

local FIELDS = {} -- @fields admit
local LATELY = 0.1 -- the weight of the last request in the share that was cached
local FULL_MS = 1000 -- when to ask again for one of the places that are taken
local now = now_ms()
local own = 'held ' .. replica

-- What may be used now of a limit, at once, and by the ms; nil: there is no limit.
local function level_of(limit, text)
  if limit == '-' then
    return nil
  end
  local burst, per_ms = string.match(limit, '^(%S+) (%S+)$')
  local level, at_ms = string.match(text or '', '^(%-?%d+%.?%d*) (%d+)$')
  burst, per_ms = tonumber(burst), tonumber(per_ms)
  level = level and math.min(burst, level + math.max(0, now - at_ms) * per_ms) or burst
  return level, burst, per_ms
end

local function left(level)
  return level and math.max(0, math.floor(level)) or -1
end

-- How many requests are under way at other replicas, and how many replicas there are; and how many at
-- this one, as a call of a larger number has said, and that number.
local function held_by(limits)
  local total, replicas, later, said_by = 0, 1, nil, number
  local all = redis.call('HGETALL', limits)
  for i = 1, #all, 2 do
    if string.sub(all[i], 1, 5) == 'held ' then
      local held, until_ms, said = string.match(all[i + 1], '^(%d+) (%d+) (%d+)$')
      if all[i] == own then
        if held and tonumber(said) > number then
          later, said_by = tonumber(held), tonumber(said)
        end
      elseif held and tonumber(until_ms) > now then
        total, replicas = total + held, replicas + 1
      else
        redis.call('HDEL', limits, all[i])
      end
    end
  end
  return total, replicas, later, said_by
end

local let_in = {}
local function admit(row)
  local limits, asks, most = limits_prefix .. row.key, row.asks == '1', tonumber(row.concurrent)
  local texts = redis.call('HMGET', limits, 'requests', 'tokens', 'uncached', 'cached_share')
  local share = whole(texts[4], 1000) or 0
  local num_requests, num_tokens = tonumber(row.num_requests), tonumber(row.num_tokens)
  local num_uncached = tonumber(row.num_uncached)
  if asks then
    num_uncached = math.ceil(num_uncached * (1000 - share) / 1000)
  end
  local refused, retry_ms = nil, 0
  local function level_for(name, text, cost)
    local level, burst, per_ms = level_of(row[name], text)
    local lacks_ms = asks and level and (math.min(cost, burst) - level) / per_ms or 0
    if lacks_ms > retry_ms then
      refused, retry_ms = name, lacks_ms
    end
    return level
  end
  local requests = level_for('requests', texts[1], num_requests)
  local tokens = level_for('tokens', texts[2], num_tokens)
  local uncached = level_for('uncached', texts[3], num_uncached)
  -- Only places need to be counted for each request; who there is, is seen where one ends.
  local total, replicas, later, said_by, held = 0, 0, nil, number, 0
  if most > 0 or not asks then
    total, replicas, later, said_by = held_by(limits)
    held = later or row.held + (let_in[row.key] or 0)
  end
  if asks and most > 0 and total + held >= most then
    refused, retry_ms = 'concurrent', math.max(retry_ms, FULL_MS)
  end
  if refused then
    return {refused, math.ceil(retry_ms), left(requests), left(tokens), replicas}
  end
  local changes = {}
  local function put(name, level, cost)
    if level then
      changes[#changes + 1], changes[#changes + 2] = name, string.format('%.3f %d', level - cost, now)
    end
  end
  put('requests', requests, num_requests)
  put('tokens', tokens, num_tokens)
  put('uncached', uncached, num_uncached)
  if row.prompt_tokens ~= '0' then
    local cached = 1000 * row.cached_tokens / row.prompt_tokens
    changes[#changes + 1] = 'cached_share'
    changes[#changes + 1] = string.format('%d', math.min(1000, share + LATELY * (cached - share)))
  end
  if asks then
    let_in[row.key] = (let_in[row.key] or 0) + 1
    held = held + 1
  end
  if most > 0 or not asks then
    changes[#changes + 1] = own
    changes[#changes + 1] = string.format('%d %d %d', held, now + lease_ms, said_by)
  end
  redis.call('HSET', limits, unpack(changes))
  if not (asks and (texts[1] or texts[2] or texts[3])) then
    redis.call('PEXPIRE', limits, kept_ms)
  end
  return {
    1, num_uncached, left(requests and requests - num_requests), left(tokens and tokens - num_tokens),
    replicas,
  }
end

local outcomes = {}
for i, row in ipairs(rows(5, FIELDS)) do
  outcomes[i] = admit(row)
end
return outcomes
