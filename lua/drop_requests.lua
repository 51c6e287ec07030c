-- drop_requests: remove requests and queues of incarnations that do not exist, because somebody
-- renamed the keys or removed what they belonged to.
--
-- KEYS[1] workers      hash   inc -> info
-- KEYS[2] leases       zset   inc -> expiry, ms
-- KEYS[3] writers      hash   inc -> nonce
-- KEYS[4] load         hash   inc -> load
-- KEYS[5] requests:    hashes inc -> its requests
-- KEYS[6] prefills:    lists  inc -> its requests still prefilling
-- ARGV[1...] inc       str    as found behind either prefix
-- Returns  how many keys were removed
-- Cost     O(incarnations + requests of what is removed). Writes. Safe to retry.
local workers, leases, writers, load = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local requests_prefix, prefills_prefix = KEYS[5], KEYS[6]

-- Any trace will do: if only some were lost, the worker's heartbeat restores them.
local function is_known(inc)
  return redis.call('ZSCORE', leases, inc) or redis.call('HEXISTS', writers, inc) == 1
    or redis.call('HEXISTS', load, inc) == 1 or redis.call('HEXISTS', workers, inc) == 1
end

local dropped = 0
for _, inc in ipairs(ARGV) do
  if not is_known(inc) then
    dropped = dropped + redis.call('DEL', requests_prefix .. inc, prefills_prefix .. inc)
  end
end
return dropped
