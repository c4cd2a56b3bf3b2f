-- The operations on the handles of shared_handles.lua, which comes before this.

local operations = {}

function operations.find(named, trail, introduction, answered, most, most_strangers, gain)
  introduction, most, most_strangers = tonumber(introduction), tonumber(most), tonumber(most_strangers)
  local matches, seen, found, strangers, taken = {}, {}, 0, 0, false
  local function try(it, certain)
    local stranger = same_name(it.named, named) == false
    if found == most or seen[it.ident] or (stranger and strangers == most_strangers) then
      return
    end
    local kin = kinship(it, named, trail, answered == '1', tonumber(gain))
    if not kin then
      return
    end
    certain = certain and kin == 'same'
    if it.state == 'issued' then
      seen[it.ident], found, strangers = true, found + 1, strangers + (stranger and 1 or 0)
      matches[#matches + 1] = call('HGET', it.name, 'r')
      matches[#matches + 1] = certain and 1 or 0
    elseif certain then
      taken = true
    end
  end
  for messages = #trail / DIGEST, 1, -1 do
    for _, it in ipairs(under_whole(trail, messages)) do
      try(it, true)
    end
  end
  if named ~= '' then
    for _, ident in ipairs(under(named)) do
      local it = live(ident)
      if it then
        try(it, true)
      end
    end
  end
  if #trail / DIGEST > introduction then
    for _, ident in ipairs(under(trail:sub(introduction * DIGEST + 1, (introduction + 1) * DIGEST))) do
      local it = found < most and live(ident)
      if it then
        try(it, false)
      end
    end
  end
  if found > 0 then
    return { 'miss', unpack(matches) }
  end
  if taken then
    return { 'taken' }
  end
  local names = { named }
  for messages = #trail / DIGEST, introduction + 1, -1 do
    names[#names + 1] = trail:sub((messages - 1) * DIGEST + 1, messages * DIGEST)
  end
  for _, name in ipairs(names) do
    local why = name ~= '' and call('GET', key('a:', name))
    if why then
      return { why }
    end
  end
  return { 'miss' }
end

function operations.take(ident)
  local it = live(ident)
  if not it or it.state ~= 'issued' then
    return {}
  end
  busy(it)
  call('HSET', it.name, 's', 'taken')
  return { call('HINCRBY', it.name, 'g', 1) }
end

function operations.put_back(ident, grant)
  local it = live(ident)
  if not it or it.state ~= 'taken' or it.grants ~= tonumber(grant) then
    return {}
  end
  call('HSET', it.name, 's', 'issued')
  if it.revoked then
    return { withdraw(ident) }
  end
  idle(it)
  return {}
end

function operations.spend(ident, grant)
  local it = live(ident)
  if it and it.state == 'taken' and it.grants == tonumber(grant) then
    finish(it, 'spent')
  end
  return {}
end

function operations.withdraw(ident)
  local it = live(ident)
  if not it or it.state ~= 'issued' then
    return { 0 }
  end
  finish(it, 'released')
  return { 1 }
end

function operations.put(ident, record, deadline, process, named, trail, introduction, answered, keys, blocks,
                        most_handles, most_bytes, most_blocks, most_threads)
  local size = #record + #blocks + #trail
  if call('EXISTS', key('h:', ident)) == 1 or now >= tonumber(deadline) then
    return {}
  end
  if size > tonumber(most_bytes) then
    return { 'full', record }
  end
  local given_up, older = {}, {}
  local function give_up(why, one)
    local old = withdraw(one)
    if old then
      given_up[#given_up + 1] = why
      given_up[#given_up + 1] = old
    end
  end
  for messages = 1, #trail / DIGEST do
    for _, it in ipairs(under_whole(trail, messages)) do
      if outgrown(it, named, trail) then
        older[it.ident] = true
        give_up('superseded', it.ident)
      end
    end
  end
  if named ~= '' then
    local others = {}
    for _, one in ipairs(call('ZRANGE', key('x:', named), 0, -1)) do
      if not older[one] and live(one) then
        others[#others + 1] = one
      end
    end
    for place = 1, #others + 1 - tonumber(most_threads) do
      give_up('superseded', others[place])
    end
  end
  while call('ZCARD', key('all', '')) >= tonumber(most_handles)
    or tonumber(call('GET', key('size', '')) or '0') + size > tonumber(most_bytes) do
    local oldest = longest_idle(key('idle', ''))
    if not oldest then
      break
    end
    give_up('full', oldest)
  end
  local it = {
    ident = ident, name = key('h:', ident), process = process, order = call('INCR', key('order', '')),
  }
  call('HSET', it.name, 'r', record, 'd', deadline, 's', 'issued', 'g', 0, 'v', '', 'p', process, 'o', it.order,
    'z', size, 'n', named, 'i', introduction, 'a', answered, 't', trail, 'k', keys, 'b', blocks, 'm', 0)
  call('EXPIRE', it.name, math.ceil(tonumber(deadline) - now) + keep)
  call('ZADD', key('all', ''), deadline, ident)
  call('ZADD', key('q:', process), deadline, ident)
  call('INCRBY', key('size', ''), size)
  local retained = count_blocks(process, blocks, true)
  if most_blocks ~= '' then
    while retained > tonumber(most_blocks) do
      local oldest = longest_idle(key('p:', process))
      if not oldest then
        break
      end
      give_up('budget', oldest)
      retained = tonumber(call('HGET', key('blocks', ''), process))
    end
  end
  idle(it)
  for _, name in ipairs(words(keys)) do
    call('ZADD', key('x:', name), it.order, ident)
    lasting(key('x:', name))
    call('DEL', key('a:', name))
  end
  for _, name in ipairs({ 'all', 'idle', 'order', 'size', 'blocks' }) do
    lasting(key(name, ''))
  end
  for _, kind in ipairs({ 'p:', 'q:', 'u:' }) do
    lasting(key(kind, process))
  end
  return given_up
end

function operations.renew(ident, record, deadline)
  local it = live(ident)
  if not it or it.state ~= 'issued' or now >= tonumber(deadline) then
    return { 0 }
  end
  local grown = #record - call('HSTRLEN', it.name, 'r')
  call('HSET', it.name, 'r', record, 'd', deadline, 'z', it.size + grown, 'm', 0)
  call('EXPIRE', it.name, math.ceil(tonumber(deadline) - now) + keep)
  call('INCRBY', key('size', ''), grown)
  call('ZADD', key('all', ''), deadline, ident)
  call('ZADD', key('q:', it.process), deadline, ident)
  return { 1 }
end

function operations.due(before, most, claim)
  -- Those that are given are nobody else's to renew for so many seconds.
  local found = {}
  for _, ident in ipairs(call('ZRANGEBYSCORE', key('all', ''), '-inf', before)) do
    local state, claimed = unpack(call('HMGET', key('h:', ident), 's', 'm'))
    if state == 'issued' and tonumber(claimed) <= now then
      local it = live(ident)
      if it then
        call('HSET', it.name, 'm', string.format('%.6f', now + tonumber(claim)))
        found[#found + 1] = call('HGET', it.name, 'r')
      end
      if #found == tonumber(most) then
        break
      end
    end
  end
  return found
end

function operations.note_absent(why, ...)
  for _, name in ipairs({ ... }) do
    note(name, why)
  end
  return {}
end

local function revoke(idents)
  local records = {}
  for _, ident in ipairs(idents) do
    records[#records + 1] = withdraw(ident)
  end
  return records
end

operations['end'] = function(named)
  return revoke(call('ZRANGE', key('x:', named), 0, -1))
end

function operations.give_up(process, most)
  for _, ident in ipairs(call('ZRANGE', key('q:', process), 0, -1)) do
    if call('HGET', key('h:', ident), 's') == 'taken' then
      withdraw(ident)
    end
  end
  return revoke(call('ZRANGE', key('p:', process), 0, tonumber(most) - 1))
end

function operations.orphan(process, most)
  local gone = 0
  for _, ident in ipairs(call('ZRANGE', key('q:', process), 0, tonumber(most) - 1)) do
    local it = handle(ident)
    if it then
      finish(it, 'orphaned')
    else
      call('ZREM', key('q:', process), ident)
    end
    gone = gone + 1
  end
  return { gone }
end

function operations.retained()
  local answer = {}
  local blocks = call('HGETALL', key('blocks', ''))
  for place = 1, #blocks, 2 do
    local name = key('q:', blocks[place])
    answer[#answer + 1] = blocks[place]
    answer[#answer + 1] = call('ZCARD', name)
    answer[#answer + 1] = tonumber(blocks[place + 1])
    answer[#answer + 1] = call('ZREVRANGE', name, 0, 0, 'WITHSCORES')[2] or '0'
  end
  return answer
end

function operations.tidy(most)
  return { purge(tonumber(most)) }
end

purge(PURGED)
local answer = operations[operation](unpack(ARGV, 4))
return {
  string.format('%.6f', now), ended.spent, ended.released, ended.expired, ended.orphaned, unpack(answer),
}
