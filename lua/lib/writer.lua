-- writer_of(inc): the nonce of the process that may write as `inc`; nil once it is retired.
-- Wants locals: applied.
local function writer_of(inc)
  local mark = redis.call('HGET', applied, inc)
  return mark and string.match(mark, ' (.*)$')
end
