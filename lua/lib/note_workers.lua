-- note_workers(meta, now): notes the moment of a new registration. It differs from that of the last one,
-- however close, and however the clock was set.
-- Wants lib: number.
local function note_workers(meta, now)
  local last = whole(redis.call('HGET', meta, 'workers_ms'), 1e15) or 0
  redis.call('HSET', meta, 'workers_ms', string.format('%d', math.max(now, last + 1)))
end
