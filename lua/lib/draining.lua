-- is_draining(worker): whether it is to get no requests any more. The mark is kept by worker, so it
-- outlives an incarnation.
-- draining(): the incs of all that are, as a set.
-- Wants locals: current, failures.
local function is_draining(worker)
  return string.find(redis.call('HGET', failures, worker) or '', '^draining') ~= nil
end

local function draining()
  local found = {}
  for _, name in ipairs(redis.call('HKEYS', failures)) do
    local inc = string.find(name, ':', 1, true) and redis.call('HGET', current, name)
    if inc and is_draining(name) then
      found[inc] = true
    end
  end
  return found
end
