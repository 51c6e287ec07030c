-- rounds_so_far(): of reservations, in millionths.
-- snapshot(now, since): what decisions are based on. Of everything, {now, rounds, {live inc, ...},
-- {inc, load, ...}, {inc, version, ...}}; the versions are left out where there are so few that
-- everything is always told. If a caller knows all up to version `since`, not 0, only what changed:
-- {now, rounds, {lapsed inc, ...}, {load, ...}, {inc, version, ...}, incs, loads, {inc, version}},
-- with the load of each that changed, nil if it has none, how many there are in all and how many
-- loads, and the last that did not change, from which the caller sees whether it knows the rest.
-- Wants locals: meta, leases, load, versions; and lib number.
local FEW = 32
local MANY = 4000 -- fit into one command

local function rounds_so_far()
  return whole(redis.call('HGET', meta, 'rounds'), 1e15) or 0
end

local function what_changed(now, since, num)
  local pairs = redis.call('ZRANGEBYSCORE', versions, '(' .. since, '+inf', 'WITHSCORES')
  if #pairs > 2 * MANY then
    return nil
  end
  local incs = {}
  for i = 1, #pairs, 2 do
    incs[#incs + 1] = pairs[i]
  end
  return {
    now,
    rounds_so_far(),
    redis.call('ZRANGEBYSCORE', leases, '-inf', string.format('%d', now)),
    #incs > 0 and redis.call('HMGET', load, unpack(incs)) or {},
    pairs,
    num,
    redis.call('HLEN', load),
    redis.call('ZREVRANGEBYSCORE', versions, since, '-inf', 'WITHSCORES', 'LIMIT', 0, 1),
  }
end

local function snapshot(now, since)
  local num = redis.call('ZCARD', versions)
  -- Where leases and versions are not of the same, some of them are lost.
  local known = num > FEW and since ~= '0' and num == redis.call('ZCARD', leases)
  return known and what_changed(now, since, num) or {
    now,
    rounds_so_far(),
    redis.call('ZRANGEBYSCORE', leases, string.format('(%d', now), '+inf'),
    redis.call('HGETALL', load),
    num > FEW and redis.call('ZRANGE', versions, 0, -1, 'WITHSCORES') or {},
  }
end
