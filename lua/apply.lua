-- apply: publishes one batch of an incarnation's ownership changes.
--
-- KEYS[1] shard    hash    bucket_bits
-- KEYS[2] applied  hash    inc -> "<seq> <nonce>" of its last batch
-- KEYS[3] blocks:  hashes  bucket -> sequence hash -> owners, after where engines go on
-- ARGV[1] inc      int
-- ARGV[2] nonce    str     as registered
-- ARGV[3] seq      int     one more than the last batch's; the first is 1
-- ARGV[4] essential str    1: applied even when memory is full, as it adds no entries; else 0
-- ARGV[5...] group str     the first block of a group, 16 hex digits; then 17 characters for each
--                          changed block of the group, each once: tier that now holds it (d h k) or
--                          - for none, then the sequence hash; then, for each block of which it is
--                          known where its engine goes on, a space, the block's number in the group
--                          string, counted from 1, and that: `-` or `=` and a number of blocks
-- Returns  1               applied, now or before
--          0               the incarnation is lost, or a batch is missing: resync
-- Cost     O(changes). Writes. Safe to retry.
local shard, applied, blocks_prefix = KEYS[1], KEYS[2], KEYS[3]
local inc, nonce, seq = ARGV[1], ARGV[2], tonumber(ARGV[3])
-- @include number
-- @include bucket
-- @include backs
-- @include despite_full

local mark = redis.call('HGET', applied, inc)
local last, writer = string.match(mark or '', '^(%d+) (.*)$')
local bits = bits_of(shard)
if writer ~= nonce or not bits or seq > last + 1 then
  return 0
end
if seq <= tonumber(last) then
  return 1
end

if ARGV[4] == '1' then
  despite_full(applied)
end
local bucket_of = bucket_finder(bits, blocks_prefix)
local own_entry = '^%f[%d]' .. inc .. '%a'
local number = tonumber(inc)

-- A thousand workers may hold a block. A pattern is tried at every position of such a text, so
-- first each place with the right digits is found, which takes a hundredth of the time.
local function own_entry_in(owners)
  local at = string.find(owners, inc, 1, true)
  while at do
    local first, last = string.find(owners, own_entry, at)
    if first then
      return first, last
    end
    at = string.find(owners, inc, at + 1, true)
  end
end

-- Where the first entry of a higher number begins; by bisection, as far as that saves anything.
local function place_in(owners)
  local low, high = 1, #owners
  while high - low > 64 do
    local middle = math.floor((low + high) / 2)
    local other = string.match(owners, '%a(%d+)', middle)
    if other and tonumber(other) < number then
      low = middle
    else
      high = middle
    end
  end
  local at, last, other = string.find(owners, '(%d+)%a', low)
  while at and tonumber(other) < number do
    at, last, other = string.find(owners, '(%d+)%a', last)
  end
  return at or #owners + 1
end

-- Owners stay in ascending order, so that equal sets are equal values.
local function insert(owners, entry)
  local at = place_in(owners)
  return string.sub(owners, 1, at - 1) .. entry .. string.sub(owners, at)
end

local function change_owners(owners, tier)
  local entry = tier == '-' and '' or inc .. tier
  if not owners then
    return entry
  end
  local from, to = own_entry_in(owners)
  if not from then
    return entry == '' and owners or insert(owners, entry)
  end
  return string.sub(owners, 1, from - 1) .. entry .. string.sub(owners, to + 1)
end

-- back: where this engine goes on, or nil.
local function change(field, tier, back)
  local others = backs_in(field or '')
  if others == '' and not back then
    return change_owners(field, tier)
  end
  local backs = {}
  for other in string.gmatch(others, '[^,]+') do
    if string.match(other, '^%d+') ~= inc then
      backs[#backs + 1] = other
    end
  end
  backs[#backs + 1] = back and inc .. back
  local owners = field and string.sub(field, others == '' and 1 or #others + 2)
  owners = change_owners(owners, tier)
  return #backs > 0 and owners ~= '' and table.concat(backs, ',') .. ' ' .. owners or owners
end

for i = 5, #ARGV do
  local group = ARGV[i]
  local key = bucket_of(group, 1)
  local tiers, hashes = {}, {}
  local backs, length = backs_of(group)
  for at = 17, length, 17 do
    tiers[#tiers + 1] = string.sub(group, at, at)
    hashes[#hashes + 1] = string.sub(group, at + 1, at + 16)
  end
  local all_owners = redis.call('HMGET', key, unpack(hashes))
  local kept, gone = {}, {}
  for n, hash in ipairs(hashes) do
    local owners = all_owners[n]
    local changed = change(owners, tiers[n], backs[n])
    if changed ~= '' then
      kept[#kept + 1] = hash
      kept[#kept + 1] = changed
    else
      gone[#gone + 1] = hash
    end
  end
  if #kept > 0 then
    redis.call('HSET', key, unpack(kept))
  end
  if #gone > 0 then
    redis.call('HDEL', key, unpack(gone))
  end
end
redis.call('HSET', applied, inc, string.format('%d %s', seq, nonce))
return 1
