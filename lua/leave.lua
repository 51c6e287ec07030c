-- leave: ends the waiting of requests that had their turn or gave up.
--
-- KEYS[1] line        hash   tag, of the last turn's middle; replica -> its tickets' expiry, ms
-- KEYS[2] flows       zset   flow -> tag of its first ticket
-- KEYS[3] easy_flows  zset   flow -> tag of its first ticket that every worker could take
-- KEYS[4] waiting:    zsets  flow -> such a ticket -> waits since, ms
-- KEYS[5] picky:      zsets  flow -> any other ticket -> waits since, ms
-- ARGV[1...] flow     str    then its ticket, and 1 if it had its turn, which is charged, else 0;
--                            and so on
-- Returns  nothing
-- Cost     O(tickets * log waiting). Writes. Safe to retry.
local line, flows, easy_flows, waiting_prefix, picky_prefix =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
-- @include number
-- @include line

for i = 1, #ARGV, 3 do
  take_out(ARGV[i], ARGV[i + 1], ARGV[i + 2] == '1')
end
drop_if_empty()
