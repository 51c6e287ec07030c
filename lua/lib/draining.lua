-- is_draining(worker): whether it is to get no requests any more. The mark is kept by worker, so it
-- outlives an incarnation.
-- is_tainted(worker): the same, as its engine is tainted.
-- draining(): the incs of all that are, or whose engines are tainted, and which of both: `draining` or
-- `tainted`.
-- Wants locals: current, failures.
local function is_draining(worker)
  return string.find(redis.call('HGET', failures, worker) or '', '^draining') ~= nil
end

local function is_tainted(worker)
  return redis.call('HEXISTS', failures, 'tainted ' .. worker) == 1
end

local function draining()
  local found = {}
  for _, name in ipairs(redis.call('HKEYS', failures)) do
    local tainted = string.match(name, '^tainted (.+)$')
    local inc = string.find(name, ':', 1, true) and redis.call('HGET', current, tainted or name)
    if inc and (tainted or not found[inc] and is_draining(name)) then
      found[inc] = tainted and 'tainted' or 'draining'
    end
  end
  return found
end
