-- match: returns the owners of chains of blocks, as runs of equal owners.
--
-- Along a chain each live incarnation goes device -> host -> disk -> absent and never back (the agents
-- ensure that), so equal owners at two positions mean the same owners between them: bisecting for the
-- changes misses nothing, and a chain may be any selection of a prompt's blocks in order. Lua hashes an
-- argument byte by byte, 1.2 ns each, used or not: send few hashes.
--
-- KEYS[1] shard    hash    bucket_bits
-- KEYS[2] dead     set     inc whose entries may still be present
-- KEYS[3] blocks:  hashes  bucket -> sequence hash -> owners, after where engines go on
-- ARGV[1] exact    int    how many changes, the last ones of a chain, are looked for to the block;
--                          others only to `length / parts`, as many workers that all end elsewhere
--                          would cost a lookup for each block
-- ARGV[2] parts    int
-- ARGV[3...]       str     four per chain: its sequence hashes, 16 hex digits each, beginning with
--                          the first block of a group; how many of them make up a group; positions
--                          that nonetheless belong to the group before them, space-separated;
--                          positions to look at first, as owners may change there, space-separated.
--                          Positions are counted from 1
-- Returns  {bucket_bits, dead, {rough, end_1, owners_1, end_2, owners_2, ...}, ...}   the last for
--                          each chain: owners_k hold the positions after end_(k-1) up to end_k,
--                          counted from 1; nobody holds what follows. Before them, and a space,
--                          what end_k's field says of where engines go on. Of ends up to `rough`,
--                          those who end there may hold up to `length / parts` more
-- Cost     O(chains * (exact * log blocks + parts)). Reads only.
local shard, dead, blocks_prefix = KEYS[1], KEYS[2], KEYS[3]
local exact, parts = tonumber(ARGV[1]), tonumber(ARGV[2])
-- @include number
-- @include bucket

-- Without bucket_bits the shard is empty: nobody has published, or Redis lost it.
local bits = bits_of(shard) or 1
local bucket_of = bucket_finder(bits, blocks_prefix)
local gone = redis.call('SMEMBERS', dead)

-- The sweep removes a dead incarnation's entries in any order; left in, they would make the owners
-- differ from block to block.
local is_gone = {}
for _, inc in ipairs(gone) do
  is_gone[inc] = true
end
-- By the owners as stored: most blocks of all chains together have the same few.
local left = {}
local function living(owners)
  if #gone > 0 then
    left[owners] = left[owners] or string.gsub(owners, '(%d+)%a', function(inc)
      return is_gone[inc] and '' or nil
    end)
    owners = left[owners]
  end
  return owners ~= '' and owners
end

-- The current chain, how its blocks are grouped, where its owners may change, and what was seen at
-- its positions of where engines go on.
local chain, length, group_size, follows, guesses, backs

local function owners_at(position)
  -- The first block of its group.
  local leader = position - (position - 1) % group_size
  while follows[leader] do
    leader = leader - 1
  end
  local owners = redis.pcall('HGET', bucket_of(chain, leader * 16 - 15),
    string.sub(chain, position * 16 - 15, position * 16))
  -- Somebody may have turned the bucket into another type of key.
  if type(owners) ~= 'string' then
    return false
  end
  local space = string.find(owners, ' ', 1, true)
  if space then
    backs[position], owners = string.sub(owners, 1, space), string.sub(owners, space + 1)
  end
  return living(owners)
end

local function between(from, to)
  for i = 1, #guesses do
    if from < guesses[i] and guesses[i] < to then
      return guesses[i]
    end
  end
  return math.floor((from + to) / 2)
end

-- The changes found so far, the last one first: where they are, and who holds what is before them.
local ends, held, rough

-- Finds where the owners change after position `from`, up to position `to`, the last ones first.
local function split(from, from_owners, to, to_owners)
  local width = to - from
  if width == 1 or (#ends >= exact and width <= length / parts) then
    if width > 1 then
      rough = math.max(rough, from)
    end
    ends[#ends + 1], held[#held + 1] = from, from_owners
    return
  end
  local middle = between(from, to)
  local owners = owners_at(middle)
  if owners and owners ~= to_owners then
    split(middle, owners, to, to_owners)
  end
  if owners ~= from_owners then
    split(from, from_owners, middle, owners)
  end
end

local function runs_of_chain()
  ends, held, rough, backs = {}, {}, 0, {}
  local first = length > 0 and owners_at(1)
  if first then
    local last = owners_at(length)
    if last then
      ends[1], held[1] = length, last
    end
    if last ~= first then
      split(1, first, length, last)
    end
  end
  local runs = {rough}
  for i = #ends, 1, -1 do
    runs[#runs + 1] = ends[i]
    local back = backs[ends[i]]
    runs[#runs + 1] = back and back .. held[i] or held[i]
  end
  return runs
end

local function numbers(text)
  local found = {}
  for number in string.gmatch(text, '%d+') do
    found[#found + 1] = tonumber(number)
  end
  return found
end

local answer = {bits, gone}
for i = 3, #ARGV, 4 do
  chain, length, group_size = ARGV[i], #ARGV[i] / 16, tonumber(ARGV[i + 1])
  follows = {}
  for _, position in ipairs(numbers(ARGV[i + 2])) do
    follows[position] = true
  end
  guesses = numbers(ARGV[i + 3])
  answer[#answer + 1] = runs_of_chain()
end
return answer
