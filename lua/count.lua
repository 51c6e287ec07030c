-- count: adds what requests have used to an hour's sums, once, however often that is sent.
--
-- KEYS[1] usage:      hashes  hour -> who sent requests, and for which model -> what they used
-- ARGV[1] hour        int   since 1970
-- ARGV[2] replica     str   the process that counts; without spaces
-- ARGV[3] number      int   > 0; of this call of that replica: the same if it is sent again, else larger
-- ARGV[4] kept_ms     int   > 0; the hour is forgotten after that
-- ARGV[5] max_fields  int   > 0; past so many, what is new counts as of `other other <model>`
-- ARGV[6...] UsageRow str   of app/state/records.py: key, tenant and model, `-` for none; then what requests
--                           used: requests, failed, refused, prompt_tokens, cached_tokens,
--                           output_tokens, waited_ms and by_router, of which the router counted tokens
-- Returns  1: it is counted; 0: it had been counted
-- Cost     O(rows). Writes. Safe to retry.
local usage_prefix, hour, replica, number = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local kept_ms, max_fields = tonumber(ARGV[4]), tonumber(ARGV[5])
-- @include number
-- @include rows

local FIELDS = {} -- @fields count
local usage = usage_prefix .. hour
local last = whole(redis.call('HGET', usage, replica), 1e15) or 0
if last >= number then
  return 0
end
local is_full
for _, row in ipairs(rows(6, FIELDS)) do
  local field = row.key .. ' ' .. row.tenant .. ' ' .. row.model
  local sums = redis.call('HGET', usage, field)
  if not sums then
    if is_full == nil then
      is_full = redis.call('HLEN', usage) >= max_fields
    end
    if is_full then
      field = 'other other ' .. row.model
      sums = redis.call('HGET', usage, field)
    end
  end
  local next_sum = string.gmatch(sums or '', '%d+')
  local new = {}
  for i = 4, #FIELDS do
    new[#new + 1] = string.format('%.0f', row[FIELDS[i]] + (next_sum() or 0))
  end
  redis.call('HSET', usage, field, table.concat(new, ' '))
end
redis.call('HSET', usage, replica, number)
if last == 0 then
  redis.call('PEXPIRE', usage, kept_ms)
end
return 1
