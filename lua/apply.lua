-- apply: one batch of an incarnation's ownership changes.
--
-- KEYS[1] shard    hash    bucket_bits
-- KEYS[2] applied  hash    inc -> "<seq> <nonce>" of its last batch
-- KEYS[3] blocks:  hashes  bucket -> sequence hash -> owners
-- ARGV[1] inc      int
-- ARGV[2] nonce    str     as registered
-- ARGV[3] seq      int     one more than the last batch's; the first is 1
-- ARGV[4] changes  str     17 characters each: tier now held (d h k) or - for none, then the
--                          sequence hash as 16 hex digits
-- Returns  1               applied, now or before
--          0               the incarnation is lost, or a batch is missing: resync
-- Cost     O(changes). Writes. Safe to retry.
local shard, applied, blocks_prefix = KEYS[1], KEYS[2], KEYS[3]
local inc, nonce, seq, changes = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
-- @include bucket

local mark = redis.call('HGET', applied, inc)
local last, writer = string.match(mark or '', '^(%d+) (.*)$')
local bits = redis.call('HGET', shard, 'bucket_bits')
if writer ~= nonce or not bits or seq > last + 1 then
  return 0
end
if seq <= tonumber(last) then
  return 1
end

local bucket_name = bucket_namer(tonumber(bits))
local own_entry = '%f[%d]' .. inc .. '%a'
local number = tonumber(inc)

-- Owners stay in ascending order, so that equal sets are equal values.
local function insert(owners, entry)
  local last = string.match(owners, '(%d+)%a$')
  if not last then
    return entry
  end
  if tonumber(last) < number then
    return owners .. entry
  end
  for at, other in string.gmatch(owners, '()(%d+)%a') do
    if tonumber(other) > number then
      return string.sub(owners, 1, at - 1) .. entry .. string.sub(owners, at)
    end
  end
end

local function change(owners, tier)
  local from, to = string.find(owners, own_entry)
  local entry = tier == '-' and '' or inc .. tier
  if from then
    return string.sub(owners, 1, from - 1) .. entry .. string.sub(owners, to + 1)
  end
  return entry == '' and owners or insert(owners, entry)
end

-- Whether the block had no owner, and has this one now.
local function set_first(key, hash, entry)
  local answer = redis.pcall('HSETNX', key, hash, entry)
  if type(answer) == 'table' then
    if not string.find(answer.err, 'WRONGTYPE', 1, true) then
      error(answer.err)
    end
    redis.call('DEL', key)
    answer = redis.call('HSETNX', key, hash, entry)
  end
  return answer == 1
end

for at = 1, #changes, 17 do
  local tier, hash = string.sub(changes, at, at), string.sub(changes, at + 1, at + 16)
  local key = blocks_prefix .. bucket_name(hash)
  if tier == '-' or not set_first(key, hash, inc .. tier) then
    local owners = redis.call('HGET', key, hash)
    local changed = owners and change(owners, tier)
    if changed == '' then
      redis.call('HDEL', key, hash)
    elseif changed ~= owners then
      redis.call('HSET', key, hash, changed)
    end
  end
end
redis.call('HSET', applied, inc, string.format('%d %s', seq, nonce))
return 1
