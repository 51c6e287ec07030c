-- writer_of(inc): the nonce of the process that may act as `inc`; false once it is retired.
-- Wants locals: writers.
local function writer_of(inc)
  return redis.call('HGET', writers, inc)
end
