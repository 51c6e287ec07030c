-- Marks of workers whose agents are away, while routers vouch for their engines: how long that has been
-- so, and until when they last vouched.
-- VOUCHED_MS: for so long they do, each time.
-- away(inc): since and until when, in ms; nil if its agent is heard of, as far as the mark says.
-- is_told(since_ms, until_ms): whether operators were told: not of an agent that was only late.
-- note_heard(inc): forgets the mark. Returns whether operators were told of it.
-- Wants locals: failures; and lib number.
local VOUCHED_MS = 3000

local function away(inc)
  local since_ms, until_ms = string.match(redis.call('HGET', failures, 'away:' .. inc) or '',
    '^(%d+) (%d+)$')
  since_ms, until_ms = whole(since_ms, 1e15), whole(until_ms, 1e15)
  if since_ms and until_ms then
    return since_ms, until_ms
  end
end

local function is_told(since_ms, until_ms)
  return until_ms - since_ms > VOUCHED_MS
end

local function note_heard(inc)
  local since_ms, until_ms = away(inc)
  if since_ms then
    redis.call('HDEL', failures, 'away:' .. inc)
  end
  return since_ms ~= nil and is_told(since_ms, until_ms)
end
