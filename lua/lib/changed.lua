-- changed(inc): gives an incarnation the next version, as its load or registration is no longer what
-- routers know of it. All that one script changes has one version. It is above any other, and a time
-- in us, so that after a failover that lost the last writes no other change gets it again; where the
-- clock is behind the last one, the steps are uneven, so that it is not counted to again either.
-- Wants locals: versions.
local next_version
local have_it = {}
local function changed(inc)
  if not next_version then
    local last = tonumber(redis.call('ZREVRANGE', versions, 0, 0, 'WITHSCORES')[2]) or 0
    if last > 8e15 then
      -- Somebody wrote it by hand. Without versions, routers ask for everything.
      redis.call('DEL', versions)
      last = 0
    end
    local time = redis.call('TIME')
    local now_us = time[1] * 1e6 + time[2]
    next_version = string.format('%.0f', now_us > last and now_us or last + 1 + now_us % 4096)
  end
  if not have_it[inc] then
    redis.call('ZADD', versions, next_version, inc)
    have_it[inc] = true
  end
end
