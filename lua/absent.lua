-- absent: which incarnations have ended, or were lost when Redis lost data.
--
-- KEYS[1] writers  hash   inc -> nonce
-- ARGV[1...]       int    inc; at most 4,000 of them
-- Returns  {inc, ...}     those that no process may act as
-- Cost     O(incarnations). Reads only.
local writers = KEYS[1]

local absent = {}
if #ARGV > 0 then
  for i, nonce in ipairs(redis.call('HMGET', writers, unpack(ARGV))) do
    if not nonce then
      absent[#absent + 1] = ARGV[i]
    end
  end
end
return absent
