-- sweep: removes, in one bounded step, what dead incarnations left in a shard. Any number of callers
-- may ask for steps, which together are no closer than one caller's; each continues where the last one
-- ended.
--
-- An entry may stay only while `applied` names its incarnation, as no other may publish here. So a pass
-- also removes what Redis kept by mistake; one runs every scrub_ms, even if no incarnation has died.
--
-- KEYS[1] shard         hash   bucket_bits, swept_ms, stepped_ms
-- KEYS[2] applied       hash   inc -> "<seq> <nonce>"
-- KEYS[3] dead          set    inc
-- KEYS[4] sweep         hash   cursor, within, targets of the pass under way
-- KEYS[5] blocks:       hashes bucket -> sequence hash -> owners, after where engines go on
-- ARGV[1] max_buckets   int    searched in this step, which ends early in one that is too large
-- ARGV[2] scrub_ms      int    > 0
-- ARGV[3] pause_ms      int    if the last step was a shorter time ago, whoever made it, this one
--                              only notes who is lost ...
-- ARGV[4] idle_ms       int    ... or this long, if there is nothing to sweep
-- ARGV[5...] lost       int    inc that may no longer write
-- Returns  {removed, buckets_left, {inc, ...}}   entries removed; 0 left: no pass is under way, or
--                              it was too soon; the incarnations that may write, none if too soon
-- Cost     O(max_buckets * blocks per bucket, at most 1,000 of each, + incarnations). Writes. Safe to
--          retry.
local shard, applied, dead, sweep, blocks_prefix = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local max_buckets, scrub_ms = tonumber(ARGV[1]), tonumber(ARGV[2])
local pause_ms, idle_ms = tonumber(ARGV[3]), tonumber(ARGV[4])
-- @include clock
-- @include number
-- @include bucket
-- @include backs
-- @include despite_full

despite_full(applied)
for i = 5, #ARGV do
  if redis.call('HDEL', applied, ARGV[i]) == 1 then
    redis.call('SADD', dead, ARGV[i])
  end
end
local now, bits = now_ms(), bits_of(shard)
if bits then
  local is_idle = redis.call('EXISTS', dead, sweep) == 0
  local stepped_ms = whole(redis.call('HGET', shard, 'stepped_ms'), now)
  if stepped_ms and now - stepped_ms < (is_idle and idle_ms or pause_ms) then
    return {0, 0, {}}
  end
  redis.call('HSET', shard, 'stepped_ms', string.format('%d', now))
end
local writers, is_writer = redis.call('HKEYS', applied), {}
for _, inc in ipairs(writers) do
  is_writer[inc] = true
end
if not bits then
  return {0, 0, writers}
end

local count = 2 ^ bits
local cursor = whole(redis.call('HGET', sweep, 'cursor'), count - 1)
local within = whole(redis.call('HGET', sweep, 'within'), 2 ^ 53) or 0
local targets = redis.call('HGET', sweep, 'targets') or ''
if not cursor then
  local swept_ms = whole(redis.call('HGET', shard, 'swept_ms'), now)
  if redis.call('EXISTS', dead) == 0 and swept_ms and now - swept_ms < scrub_ms then
    return {0, 0, writers}
  end
  cursor, within, targets = 0, 0, table.concat(redis.call('SMEMBERS', dead), ' ')
end

-- By the owners as stored, which many blocks have in common.
local of_writers = {}
local function kept_of(owners)
  if not of_writers[owners] then
    local kept = {}
    for inc, tier in string.gmatch(owners, '(%d+)([dhk])') do
      if is_writer[inc] then
        kept[#kept + 1] = inc .. tier
      end
    end
    local backs = {}
    for inc, back in string.gmatch(backs_in(owners), '(%d+)([-=]%d+)') do
      if is_writer[inc] then
        backs[#backs + 1] = inc .. back
      end
    end
    local left = table.concat(kept)
    of_writers[owners] = #backs > 0 and left ~= '' and table.concat(backs, ',') .. ' ' .. left or left
  end
  return of_writers[owners]
end

local removed = 0
-- Sweeps a bucket, or only part of a large one, from the HSCAN cursor `from` on. Returns where to
-- continue; 0 at the end.
local function sweep_bucket(key, from)
  local found = redis.call('HSCAN', key, from, 'COUNT', 1000)
  local behind, entries = tonumber(found[1]), found[2]
  local kept, longest = {}, 0
  for i = 1, #entries, 2 do
    local owners = kept_of(entries[i + 1])
    if owners == '' then
      redis.call('HDEL', key, entries[i])
      removed = removed + 1
    else
      kept[#kept + 1] = entries[i]
      kept[#kept + 1] = owners
      longest = math.max(longest, #owners)
      if owners ~= entries[i + 1] then
        redis.call('HSET', key, entries[i], owners)
        removed = removed + 1
      end
    end
  end
  -- If a bucket had so many owners for a moment that Redis gave up its compact encoding, Redis
  -- would never restore that by itself.
  if from == 0 and behind == 0 and longest > 0 and longest <= 64 and #kept <= 2 * 512
    and redis.call('OBJECT', 'ENCODING', key) == 'hashtable' then
    redis.call('DEL', key)
    redis.call('HSET', key, unpack(kept))
  end
  return behind
end

local stop = math.min(cursor + max_buckets, count)
while cursor < stop do
  within = sweep_bucket(blocks_prefix .. bucket_at(bits, cursor), within)
  if within > 0 then
    break
  end
  cursor = cursor + 1
end

local left = count - cursor
if left > 0 then
  redis.call('HSET', sweep, 'cursor', string.format('%d', cursor),
    'within', string.format('%d', within), 'targets', targets)
else
  redis.call('DEL', sweep)
  for inc in string.gmatch(targets, '%S+') do
    redis.call('SREM', dead, inc)
  end
  redis.call('HSET', shard, 'swept_ms', string.format('%d', now))
  -- Incarnations that died during this pass are left to the next one.
  left = redis.call('EXISTS', dead) * count
end
return {removed, left, writers}
