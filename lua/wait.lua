-- wait: queues requests of a replica for their turn, or keeps them queued.
--
-- The line expires by itself when no replica has called for some time, and its tickets a little later;
-- if one of several replicas is gone, its tickets are void, and `turns` takes them out.
--
-- KEYS[1] line        hash   tag, of the last turn's middle; replica -> its tickets' expiry, ms
-- KEYS[2] flows       zset   flow -> tag of its first ticket
-- KEYS[3] easy_flows  zset   flow -> tag of its first ticket that every worker could take
-- KEYS[4] waiting:    zsets  flow -> such a ticket -> waits since, ms
-- KEYS[5] picky:      zsets  flow -> any other ticket -> waits since, ms
-- ARGV[1] replica     str    whose requests they are; without spaces
-- ARGV[2] ttl_ms      int    > 0; how long they wait without another call, whatever it names
-- ARGV[3] kept_ms     int    > ttl_ms; how long the tickets of a flow are kept in Redis without
--                            another call that names one of them
-- ARGV[4...] flow     str    then how many of its tickets follow, at most 2,000, and for each one
--                            since_ms and "<replica>-<number> <charge> <x if not every worker could
--                            take the request, else ->", the last the same for all; and so on
-- Returns  how many were not waiting before
-- Cost     O(tickets * log waiting). Writes. Safe to retry.
local line, flows, easy_flows, waiting_prefix, picky_prefix =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local replica, ttl_ms, kept_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
-- @include clock
-- @include number
-- @include line
-- @include despite_full

despite_full(line)
redis.call('HSET', line, replica, string.format('%d', now_ms() + ttl_ms))
local added, at = 0, 4
while at < #ARGV do
  local flow, last = ARGV[at], at + 1 + 2 * ARGV[at + 1]
  local easy_tickets, picky_tickets = waiting_prefix .. flow, picky_prefix .. flow
  local first, easy = heads(flow)
  local tag = redis.call('ZSCORE', flows, flow)
  local tickets = string.sub(ARGV[last], -1) == 'x' and picky_tickets or easy_tickets
  local are_new = redis.call('ZADD', tickets, unpack(ARGV, at + 2, last))
  if are_new > 0 or not tag or easy and not redis.call('ZSCORE', easy_flows, flow) then
    set_tags(flow, first and tag and tag - charge_of(first) or virtual_time())
  end
  redis.call('PEXPIRE', easy_tickets, kept_ms)
  redis.call('PEXPIRE', picky_tickets, kept_ms)
  added, at = added + are_new, last + 1
end
redis.call('PEXPIRE', line, ttl_ms)
redis.call('PEXPIRE', flows, ttl_ms)
redis.call('PEXPIRE', easy_flows, ttl_ms)
return added
