-- info_of(inc): returns the worker's registration; empty if that cannot be read.
-- Wants locals: workers.
local function info_of(inc)
  local _, info = pcall(cjson.decode, redis.call('HGET', workers, inc))
  return type(info) == 'table' and info or {}
end
