-- turns: returns which requests, among all that wait at any replica, have their turn.
--
-- Picky tickets, which not every worker could take, come on top of those that may go, as they may be
-- unable to go and must hold up nobody. After the first max_picky of them, the others are passed over
-- as if they were not waiting.
--
-- KEYS[1] line        hash   tag, of the last turn's middle; replica -> its tickets' expiry, ms
-- KEYS[2] flows       zset   flow -> tag of its first ticket
-- KEYS[3] easy_flows  zset   flow -> tag of its first ticket that every worker could take
-- KEYS[4] waiting:    zsets  flow -> such a ticket -> waits since, ms
-- KEYS[5] picky:      zsets  flow -> any other ticket -> waits since, ms
-- ARGV[1] replica     str    the one that asks
-- ARGV[2] limit       int    > 0; how many may go
-- ARGV[3] max_picky   int    > 0; at most this many picky ones come on top
-- Returns  {flow, ticket, ...}   those of them that are the replica's, in the order of their turns
-- Cost     O((limit + max_picky)^2), log waiting for a ticket. Writes. Safe to retry.
local line, flows, easy_flows, waiting_prefix, picky_prefix =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local replica, limit, max_picky = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
-- @include clock
-- @include number
-- @include line

local now = now_ms()
local going, num_picky, some_picky = 0, 0, false

-- The next ticket of a list, which is read only as far as needed; nil if there is none.
local function peek(list)
  if list.at > #list.page and not list.is_whole then
    list.page = redis.call('ZRANGE', list.key, list.read, list.read + limit - 1)
    list.at, list.read, list.is_whole = 1, list.read + #list.page, #list.page < limit
  end
  return list.page[list.at]
end

-- Finds the flow's next ticket, and the list that it is in.
local function look(queue)
  local easy = peek(queue.easy)
  local picky = some_picky and num_picky < max_picky and peek(queue.picky) or nil
  queue.ticket = picky and first_of(queue.flow, easy, picky) or easy
  queue.list = picky and queue.ticket == picky and queue.picky or queue.easy
  if queue.start then
    queue.tag = queue.ticket and queue.start + charge_of(queue.ticket)
  end
end

-- Flows that were due, in that order; the others are in `index`, which is read a page at a time.
local begun, is_begun = {}, {}
local index, page, at, read, is_whole = flows, {}, 1, 0, false

-- The flow that is due; nil if there is none.
local function first_due()
  local first
  for _, queue in ipairs(begun) do
    if queue.tag and (not first or queue.tag < first.tag) then
      first = queue
    end
  end
  while is_begun[page[at]] or not (page[at] or is_whole) do
    if page[at] then
      at = at + 2
    else
      page = redis.call('ZRANGE', index, read, read + limit - 1, 'WITHSCORES')
      at, read, is_whole = 1, read + limit, #page < 2 * limit
      -- Usually there are no picky tickets; one command checks that for all these flows.
      local keys = {}
      for i = 1, #page, 2 do
        keys[#keys + 1] = picky_prefix .. page[i]
      end
      some_picky = some_picky or keys[1] and redis.call('EXISTS', unpack(keys)) > 0
    end
  end
  local flow, tag = page[at], tonumber(page[at + 1])
  if flow and (not first or tag < first.tag) then
    first = {
      flow = flow,
      tag = tag,
      easy = {key = waiting_prefix .. flow, page = {}, at = 1, read = 0},
      picky = {key = picky_prefix .. flow, page = {}, at = 1, read = 0},
    }
    look(first)
    begun[#begun + 1], is_begun[flow] = first, true
  end
  return first
end

local found, void, over, lives = {}, {}, {}, {}
-- 64 more, as some may be void, or removed by somebody.
for _ = 1, limit + max_picky + 64 do
  local queue = first_due()
  if not queue then
    break
  end
  local ticket, list = queue.ticket, queue.list
  if ticket then
    list.at = list.at + 1
    queue.start = queue.tag
    if list == queue.picky then
      num_picky = num_picky + 1
    end
    local owner = string.match(ticket, '^(%S+)-%d+ ') or ''
    if lives[owner] == nil then
      lives[owner] = (whole(redis.call('HGET', line, owner), 1e15) or 0) > now
    end
    if not lives[owner] then
      void[#void + 1] = {queue.flow, ticket}
      queue.start = queue.tag - charge_of(ticket)
    else
      if owner == replica then
        found[#found + 1] = queue.flow
        found[#found + 1] = ticket
      end
      if list == queue.easy then
        going = going + 1
      end
    end
  else
    -- Replicas with waiting requests say so again before long.
    over[#over + 1] = {index, queue.flow}
    queue.tag = nil
  end
  if going == limit then
    break
  end
  if num_picky == max_picky and index == flows then
    -- From now on flows are due by their easy tickets; the turns that begun flows had still count.
    for _, other in ipairs(begun) do
      look(other)
    end
    index, page, at, read, is_whole = easy_flows, {}, 1, 0, false
  else
    look(queue)
  end
end
for _, taken in ipairs(void) do
  take_out(taken[1], taken[2], false)
end
for _, ended in ipairs(over) do
  redis.call('ZREM', ended[1], ended[2])
end
drop_if_empty()
return found
