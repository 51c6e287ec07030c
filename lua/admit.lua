-- admit: lets requests of limited keys in, as far as their limits go, and settles what ended requests
-- have used.
--
-- A bucket holds what may be used at once, and fills at the rate of its limit. All that is kept of it is
-- when it will be full (GCRA). It may be overdrawn: if a request uses more than its estimate, or asks for
-- more than a full bucket, later ones wait for it.
--
-- KEYS[1] limits:     hashes  key -> when its buckets are full, and its requests at each replica
-- ARGV[1] replica     str   the process that asks; without spaces
-- ARGV[2] number      int   > 0; of this call of that replica, larger than those of earlier ones
-- ARGV[3] lease_ms    int   > 0; so long a replica's requests count without another call
-- ARGV[4] kept_ms     int   > 0; so long buckets are kept without a row that looks, and one is overdrawn
--                           no further
-- ARGV[5...] AdmitRow str   of app/state/records.py, one after another: key; asks, 1: to let a request
--                           in, 0: to settle some, 2: to settle some, say again what is held, and look
--                           who else asks; held: requests of the key under way at the replica, without
--                           those that this call asks for; concurrent: how many may be under way at all
--                           replicas, 0: any number; requests_full, requests_each, tokens_full,
--                           tokens_each, uncached_full and uncached_each: ms in which an empty bucket
--                           fills, '': there is no limit, and ms for one of them; num_requests, num_tokens, num_uncached: to take, or if it
--                           settles to give back where they are negative; of what is to be taken of
--                           uncached, the share is left out that was cached lately; prompt_tokens and
--                           cached_tokens of them, 0 and 0: not known
-- Returns  {{outcome, number, requests, tokens, replicas}, ...}   of each row: outcome 1: let in, or
--                           settled; number is then what was taken of uncached. Else which limit
--                           refuses it, and in how many ms it may not. What is left of requests and
--                           tokens, -1: no limit; how many replicas have asked about the key lately,
--                           0: not looked for
-- Cost     O(rows * replicas) if they look, or places are limited; else O(rows). Writes.
local limits_prefix, replica, number = KEYS[1], ARGV[1], tonumber(ARGV[2])
local lease_ms, kept_ms = tonumber(ARGV[3]), tonumber(ARGV[4])
-- @include clock
-- @include number
-- @include rows

local FIELDS = {} -- @fields admit
local NAMES = {'requests', 'tokens', 'uncached'}
local FULL = {'requests_full', 'tokens_full', 'uncached_full'}
local EACH = {'requests_each', 'tokens_each', 'uncached_each'}
local LATELY = 0.1 -- the weight of the last requests in the share that was cached
local FULL_MS = 1000 -- when to ask again for one of the places that are taken
local now = now_ms()
local own = 'held ' .. replica
local format, max, min = string.format, math.max, math.min

-- How many requests are under way at other replicas, and how many replicas there are.
local function others(limits)
  local total, replicas, all = 0, 1, redis.call('HGETALL', limits)
  for i = 1, #all, 2 do
    if all[i] ~= own and string.sub(all[i], 1, 5) == 'held ' then
      local held, until_ms = string.match(all[i + 1], '^(%d+) (%d+) %d+$')
      if held and tonumber(until_ms) > now then
        total, replicas = total + held, replicas + 1
      else
        redis.call('HDEL', limits, all[i])
      end
    end
  end
  return total, replicas
end

local let_in, full_ms, each_ms, until_ms = {}, {}, {}, {}
local function left(i)
  return full_ms[i] and max(0, math.floor((full_ms[i] - until_ms[i] + now) / each_ms[i])) or -1
end

local function admit(row)
  local limits, asks, most = limits_prefix .. row.key, row.asks == '1', tonumber(row.concurrent)
  local known = redis.call('HMGET', limits, 'requests_until', 'tokens_until', 'uncached_until',
    'cached_share', own)
  local share = whole(known[4], 1000) or 0
  local num_uncached = tonumber(row.num_uncached)
  if asks and share > 0 then
    num_uncached = math.ceil(num_uncached * (1000 - share) / 1000)
  end
  local costs = {tonumber(row.num_requests), tonumber(row.num_tokens), num_uncached}
  local refused, retry_ms, changes = nil, 0, {}
  for i = 1, 3 do
    full_ms[i] = tonumber(row[FULL[i]])
    if full_ms[i] then
      each_ms[i] = tonumber(row[EACH[i]])
      local cost_ms, full_at = costs[i] * each_ms[i], tonumber(known[i] or now)
      -- Somebody may have written there what is no time.
      full_at = full_at and full_at <= now + kept_ms and max(now, full_at) or now
      local lacks_ms = asks and full_at - now + min(cost_ms, full_ms[i]) - full_ms[i] or 0
      if lacks_ms > retry_ms then
        refused, retry_ms = NAMES[i], lacks_ms
      end
      until_ms[i] = full_at
      changes[#changes + 1] = NAMES[i] .. '_until'
      changes[#changes + 1] = format('%.3f', min(full_at + cost_ms, now + kept_ms))
    end
  end
  -- Only places need to be counted for each request; who there is, is seen once a second.
  local counts, total, replicas, held, said_by = most > 0 or not asks, 0, 0, 0, number
  if counts then
    held = row.held + (let_in[row.key] or 0)
    local later, said = string.match(known[5] or '', '^(%d+) %d+ (%d+)$')
    if later and tonumber(said) > number then
      held, said_by = tonumber(later), tonumber(said)
    end
  end
  if most > 0 and asks or row.asks == '2' then
    total, replicas = others(limits)
  end
  if asks and most > 0 and total + held >= most then
    refused, retry_ms = 'concurrent', max(retry_ms, FULL_MS)
  end
  if refused then
    return {refused, math.ceil(retry_ms), left(1), left(2), replicas}
  end
  for i = 1, 3 do
    until_ms[i] = full_ms[i] and until_ms[i] + costs[i] * each_ms[i]
  end
  if row.prompt_tokens ~= '0' then
    local cached = 1000 * row.cached_tokens / row.prompt_tokens
    changes[#changes + 1] = 'cached_share'
    changes[#changes + 1] = format('%d', min(1000, share + LATELY * (cached - share)))
  end
  if asks then
    let_in[row.key] = (let_in[row.key] or 0) + 1
    held = held + 1
  end
  if counts then
    changes[#changes + 1] = own
    changes[#changes + 1] = format('%d %d %d', held, now + lease_ms, said_by)
  end
  redis.call('HSET', limits, unpack(changes))
  if row.asks == '2' or not (known[1] or known[2] or known[3] or known[5]) then
    redis.call('PEXPIRE', limits, kept_ms)
  end
  return {1, num_uncached, left(1), left(2), replicas}
end

local outcomes = {}
for i, row in ipairs(rows(5, FIELDS)) do
  outcomes[i] = admit(row)
end
return outcomes
