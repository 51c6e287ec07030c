-- sweep: retire incarnations whose lease lapsed some time ago, and take one bounded step in removing what dead
-- ones left in the index. Any number of callers may take steps; each goes on where the last ended.
--
-- KEYS[1] meta          hash   bucket_bits
-- KEYS[2] workers       hash   inc -> info
-- KEYS[3] current       hash   worker -> inc
-- KEYS[4] leases        zset   inc -> expiry, ms
-- KEYS[5] applied       hash   inc -> "<seq> <nonce>"
-- KEYS[6] load          hash   inc -> load
-- KEYS[7] dead          set    inc
-- KEYS[8] sweep         hash   cursor, targets of the pass under way
-- KEYS[9] reservations  hash   request_id -> inc
-- KEYS[10] expiry       zset   request_id -> expiry, ms
-- KEYS[11] requests:    hashes inc -> its requests
-- KEYS[12] prefills:    lists  inc -> its requests still prefilling
-- KEYS[13] blocks:      hashes bucket -> sequence hash -> owners
-- ARGV[1] max_buckets   int    looked through in this step
-- ARGV[2] grace_ms      int    a lease that lapsed less long ago may still be renewed: nobody is
--                              routed there meanwhile, but its requests and blocks are kept
-- Returns  {retired, removed, buckets_left}   leases retired and entries removed in this step;
--                       0 left: nothing to sweep
-- Cost     O(max_buckets * blocks per bucket), and at most 16 retirements. Writes. Safe to retry.
local meta, workers, current, leases, applied = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local load, dead, sweep, reservations, expiry = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local requests_prefix, prefills_prefix, blocks_prefix = KEYS[11], KEYS[12], KEYS[13]
local max_buckets, grace_ms = tonumber(ARGV[1]), tonumber(ARGV[2])
-- @include clock
-- @include bucket
-- @include retire

local too_late = string.format('%d', now_ms() - grace_ms)
local lapsed = redis.call('ZRANGEBYSCORE', leases, '-inf', too_late, 'LIMIT', 0, 16)
for _, inc in ipairs(lapsed) do
  retire(inc)
  local info = redis.call('HGET', workers, inc)
  local worker = info and cjson.decode(info).worker
  if worker and redis.call('HGET', current, worker) == inc then
    redis.call('HDEL', current, worker)
  end
end

local bits = redis.call('HGET', meta, 'bucket_bits')
local cursor, targets = unpack(redis.call('HMGET', sweep, 'cursor', 'targets'))
if not targets then
  cursor, targets = 0, table.concat(redis.call('SMEMBERS', dead), ' ')
end
if not bits or targets == '' then
  return {#lapsed, 0, 0}
end

local is_target = {}
for inc in string.gmatch(targets, '%d+') do
  is_target[inc] = true
end
local function without_targets(owners)
  return (string.gsub(owners, '(%d+)%a', function(inc)
    return is_target[inc] and '' or nil
  end))
end

local count = 2 ^ bits
local stop = math.min(cursor + max_buckets, count)
local removed = 0
for bucket = cursor, stop - 1 do
  local key = blocks_prefix .. bucket_at(bits, bucket)
  local entries = redis.call('HGETALL', key)
  for i = 1, #entries, 2 do
    local owners = without_targets(entries[i + 1])
    if owners ~= entries[i + 1] then
      removed = removed + 1
      if owners == '' then
        redis.call('HDEL', key, entries[i])
      else
        redis.call('HSET', key, entries[i], owners)
      end
    end
  end
end

local left = count - stop
if left > 0 then
  redis.call('HSET', sweep, 'cursor', string.format('%d', stop), 'targets', targets)
else
  redis.call('DEL', sweep)
  for inc in pairs(is_target) do
    redis.call('SREM', dead, inc)
    redis.call('HDEL', workers, inc)
  end
  if redis.call('EXISTS', dead) == 1 then
    -- Who died during this pass is left to the next one.
    left = count
  end
end
return {#lapsed, removed, left}
