-- turns: whose turn it is, of all that wait at any replica.
--
-- KEYS[1] line       hash   tag, of the last turn; replica -> until when its tickets hold, ms
-- KEYS[2] flows      zset   flow -> tag of its first ticket
-- KEYS[3] waiting:   zsets  flow -> ticket -> waits since, ms
-- ARGV[1] replica    str    who asks
-- ARGV[2] limit      int    so many may go; those that not every worker could take come on top, as
--                           they may not be able to and shall hold up nobody
-- Returns  {flow, ticket, ...}   those of them that are the replica's, in the order of their turns
-- Cost     O(limit^2 + 64 * limit), log waiting for a ticket. Writes. Safe to retry.
local line, flows, waiting_prefix = KEYS[1], KEYS[2], KEYS[3]
local replica, limit = ARGV[1], tonumber(ARGV[2])
-- @include clock
-- @include number
-- @include line

local now = now_ms()
local queues = {}
local due = redis.call('ZRANGE', flows, 0, limit + 31, 'WITHSCORES')
for i = 1, #due, 2 do
  queues[#queues + 1] = {flow = due[i], tag = tonumber(due[i + 1]), tickets = {}, at = 1, read = 0}
end

-- The queue's next ticket; nil if there is none.
local function peek(queue)
  if queue.at > #queue.tickets then
    queue.tickets = redis.call(
      'ZRANGE', waiting_prefix .. queue.flow, queue.read, queue.read + limit - 1)
    queue.read = queue.read + #queue.tickets
    queue.at = 1
  end
  return queue.tickets[queue.at]
end

local lives = {}
local function is_void(ticket)
  local owner = string.match(ticket, '^(%S+)-%d+ ') or ''
  if lives[owner] == nil then
    lives[owner] = (whole(redis.call('HGET', line, owner), 1e15) or 0) > now
  end
  return not lives[owner]
end

local void = {}
-- The first ticket in line, and its flow; the next one of that is then its flow's first.
local function take_first()
  local first
  for _, queue in ipairs(queues) do
    if queue.tag and (not first or queue.tag < first.tag) then
      first = queue
    end
  end
  if not first then
    return
  end
  local ticket = peek(first)
  if not ticket then
    -- Somebody removed them; those who wait say so again before long.
    redis.call('ZREM', flows, first.flow)
    first.tag = nil
    return take_first()
  end
  first.at = first.at + 1
  local start = first.tag
  if is_void(ticket) then
    void[#void + 1] = {first.flow, ticket}
    start = start - charge_of(ticket)
  end
  local next_ticket = peek(first)
  first.tag = next_ticket and start + charge_of(next_ticket)
  return ticket, first.flow
end

local found, going = {}, 0
for _ = 1, limit + 64 do
  local ticket, flow = take_first()
  if not ticket then
    break
  end
  if not is_void(ticket) then
    if string.sub(ticket, 1, #replica + 1) == replica .. '-' then
      found[#found + 1] = flow
      found[#found + 1] = ticket
    end
    if string.sub(ticket, -1) ~= 'x' then
      going = going + 1
    end
  end
  if going == limit then
    break
  end
end
for _, taken in ipairs(void) do
  take_out(taken[1], taken[2], false)
end
drop_if_empty()
return found
