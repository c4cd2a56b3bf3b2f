-- The handles that routers share; shared_store.lua, which goes on here, has the operations. Each call is one of them and
-- atomic. What they mean says kvloop_router.kept, and the life cycle of a handle kvloop_connector.lifecycle.
--
-- KEYS[1]: what all keys start with. ARGV: the operation, the time or nothing for the server's own, for how many
-- seconds keys outlive their last use, then the operation's own arguments.
-- Answers: the time, how many handles were spent, released, expired and orphaned, then the operation's own answer.
--
--   h:IDENT   a handle: r record, d deadline, s issued|taken, g grants, v revoked, p process, o order, z size, k keys,
--             n key of its conversation id, t digests of its history, i introduction, a answered, b blocks, m claimed
--   x:KEY     the handles under a key, by order            a:KEY  why there is none any more
--   all       all handles by deadline                      idle   those that nobody has taken, by order
--   p:PROCESS the idle ones of an engine process           q:PROCESS  all of them, by deadline
--   u:PROCESS how many handles hold each block, a byte each; 255: as many as w:PROCESS says
--   blocks    how many blocks each process retains         order, size: counters

local prefix, operation, keep = KEYS[1], ARGV[1], tonumber(ARGV[3])
local call = redis.call
local now
if ARGV[2] ~= '' then
  now = tonumber(ARGV[2])
else
  local time = call('TIME')
  now = tonumber(time[1]) + tonumber(time[2]) / 1e6
end
local ended = { spent = 0, released = 0, expired = 0, orphaned = 0 }
local absence_after = { spent = 'taken', released = 'evicted', expired = 'expired', orphaned = 'engine_gone' }
local DIGEST, PURGED, MANY = 8, 16, 254

local function key(kind, name)
  return prefix .. kind .. name
end

local function lasting(name)
  call('EXPIRE', name, keep)
end

local function words(text)
  -- Keys, each with its length before it in two bytes.
  local found, place = {}, 1
  while place <= #text do
    local length = text:byte(place) * 256 + text:byte(place + 1)
    found[#found + 1] = text:sub(place + 2, place + 1 + length)
    place = place + 2 + length
  end
  return found
end

local function handle(ident)
  local name = key('h:', ident)
  local got = call('HMGET', name, 's', 'd', 'g', 'v', 'p', 'o', 'z', 'n', 'i', 'a', 't', 'k', 'b', 'm')
  if not got[1] then
    return nil
  end
  return {
    ident = ident, name = name, state = got[1], deadline = tonumber(got[2]), grants = tonumber(got[3]),
    revoked = got[4] == '1', process = got[5], order = tonumber(got[6]), size = tonumber(got[7]), named = got[8],
    introduction = tonumber(got[9]), answered = got[10] == '1', trail = got[11], keys = got[12], blocks = got[13],
    claimed = tonumber(got[14]),
  }
end

local function note(name, why)
  if name ~= '' then
    call('SET', key('a:', name), why, 'EX', keep)
  end
end

local function count_each(process, base, part, up)
  -- Where some block of the part has too many holders for a byte.
  local many, bytes, changed = key('w:', process), { part:byte(1, -1) }, 0
  for place, held in ipairs(bytes) do
    local block = base + place - 1
    if up then
      if held == 0 then
        changed = changed + 1
      end
      if held < MANY then
        bytes[place] = held + 1
      else
        if held == MANY then
          call('HSET', many, block, MANY)
        end
        call('HINCRBY', many, block, 1)
        bytes[place] = MANY + 1
      end
    elseif held > MANY then
      if call('HINCRBY', many, block, -1) <= MANY then
        call('HDEL', many, block)
        bytes[place] = MANY
      end
    elseif held > 0 then
      bytes[place] = held - 1
      if held == 1 then
        changed = changed + 1
      end
    end
  end
  lasting(many)
  for place, byte in ipairs(bytes) do
    bytes[place] = string.char(byte)
  end
  return table.concat(bytes), changed
end

local more, fewer
local function steps()
  if not more then
    more, fewer = {}, {}
    for byte = 0, 255 do
      more[string.char(byte)] = string.char(math.min(byte + 1, 255))
      fewer[string.char(byte)] = string.char(math.max(byte - 1, 0))
    end
  end
end

local function count_blocks(process, blocks, up)
  -- Count the blocks of one handle more, or one fewer.
  local name, changed = key('u:', process), 0
  local before, after = up and '\0' or '\1', up and '\1' or '\0'
  for place = 1, #blocks, 8 do
    local first, length = struct.unpack('<I4I4', blocks, place)
    local longest = 4096
    while length > 0 do
      local here = math.min(length, longest)
      local part = call('GETRANGE', name, first, first + here - 1)
      part = part .. string.rep('\0', here - #part)
      local result
      if part == string.rep(before, here) then
        result, changed = string.rep(after, here), changed + here
      elseif part:find('[\254\255]') then
        local some
        result, some = count_each(process, first, part, up)
        changed = changed + some
      else
        steps()
        result = part:gsub('.', up and more or fewer)
        local _, some = part:gsub(up and '%z' or '\1', '')
        changed = changed + some
      end
      call('SETRANGE', name, first, result)
      first, length = first + here, length - here
    end
  end
  return call('HINCRBY', key('blocks', ''), process, up and changed or 0 - changed)
end

local function idle(it)
  call('ZADD', key('idle', ''), it.order, it.ident)
  call('ZADD', key('p:', it.process), it.order, it.ident)
end

local function busy(it)
  call('ZREM', key('idle', ''), it.ident)
  call('ZREM', key('p:', it.process), it.ident)
end

local function finish(it, state)
  -- The handle is over.
  busy(it)
  call('DEL', it.name)
  call('ZREM', key('all', ''), it.ident)
  call('DECRBY', key('size', ''), it.size)
  call('ZREM', key('q:', it.process), it.ident)
  if call('EXISTS', key('q:', it.process)) == 0 then
    call('DEL', key('u:', it.process), key('w:', it.process))
    call('HDEL', key('blocks', ''), it.process)
  else
    count_blocks(it.process, it.blocks, false)
  end
  for _, name in ipairs(words(it.keys)) do
    call('ZREM', key('x:', name), it.ident)
  end
  note(it.named, absence_after[state])
  note(it.trail:sub(-DIGEST), absence_after[state])
  ended[state] = ended[state] + 1
end

local function live(ident)
  -- The handle, unless its time is over.
  local it = handle(ident)
  if it and now >= it.deadline then
    finish(it, 'expired')
    return nil
  end
  return it
end

local function purge(most)
  local over = call('ZRANGEBYSCORE', key('all', ''), '-inf', string.format('%.6f', now), 'LIMIT', 0, most)
  for _, ident in ipairs(over) do
    if handle(ident) then
      live(ident)
    else
      -- Evicted by the server.
      call('ZREM', key('all', ''), ident)
      call('ZREM', key('idle', ''), ident)
    end
  end
  return #over
end

local function withdraw(ident)
  -- Give up a handle: its record, where it can be released; one that is taken is revoked.
  local it = live(ident)
  if not it then
    return nil
  end
  if it.state == 'taken' then
    call('HSET', it.name, 'v', '1')
    return nil
  end
  local record = call('HGET', it.name, 'r')
  finish(it, 'released')
  return record
end

local function longest_idle(name)
  -- Its ident, or nil. An index may name a handle that the server has evicted.
  while true do
    local ident = call('ZRANGE', name, 0, 0)[1]
    if not ident or call('EXISTS', key('h:', ident)) == 1 then
      return ident
    end
    call('ZREM', name, ident)
  end
end

local function common(left, right)
  -- How many leading messages two histories share; each digest covers all before it.
  local low, high = 0, math.min(#left, #right) / DIGEST
  while low < high do
    local middle = math.floor((low + high + 1) / 2)
    local from, to = (middle - 1) * DIGEST + 1, middle * DIGEST
    if left:sub(from, to) == right:sub(from, to) then
      low = middle
    else
      high = middle - 1
    end
  end
  return low
end

local function same_name(left, right)
  -- Whether two conversation ids are one; nil where one of them is not known.
  if left == '' or right == '' then
    return nil
  end
  return left == right
end

local function kinship(it, named, trail, answered, gain)
  -- As kvloop_router.history says: what a new history is to a handle's; nil, 'like' or 'same'.
  local same, shared, length = same_name(it.named, named), common(it.trail, trail), #trail / DIGEST
  local whole = shared == #it.trail / DIGEST
  if same then
    return 'same'
  end
  if shared <= it.introduction or not (shared < length or answered or whole) then
    return nil
  end
  if same == nil then
    return whole and (shared < length or it.answered) and 'same' or 'like'
  end
  return shared >= gain * (#it.trail / DIGEST - shared) and 'like' or nil
end

local function outgrown(it, named, trail)
  -- As there: whether whatever a handle retains, that of a new history that begins with all of its own does too.
  local same, length = same_name(it.named, named), #it.trail / DIGEST
  if same == nil then
    return it.introduction + 1 < length and it.answered and length < #trail / DIGEST
  end
  return same
end

local function under(name)
  return call('ZREVRANGE', key('x:', name), 0, -1)
end

local function under_whole(trail, messages)
  -- The handles whose whole history is the first so many messages.
  local found = {}
  for _, ident in ipairs(under(trail:sub((messages - 1) * DIGEST + 1, messages * DIGEST))) do
    local it = live(ident)
    if it and #it.trail == messages * DIGEST then
      found[#found + 1] = it
    end
  end
  return found
end
