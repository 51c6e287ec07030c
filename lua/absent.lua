-- absent: which incarnations are over, or were lost with what Redis lost.
--
-- KEYS[1] writers  hash   inc -> nonce
-- ARGV[1...]       int    inc; of at most 4,000
-- Returns  {inc, ...}     those that nobody writes as
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
