"""The Lua scripts: each is one atomic step on one job's keys. None of them parses JSON."""

APPEND = """
-- KEYS seen, facts. ARGV source, boot, install, then for each entry: seq, number of strings, strings.
-- An entry whose number is not above what was seen changes nothing and is success.
local seen = redis.call('HGET', KEYS[1], ARGV[1])
local cut = seen and string.find(seen, ':', 1, true)
local last = '0'
if cut then
  if string.sub(seen, cut + 1) == ARGV[2] then
    last = string.sub(seen, 1, cut - 1)
  elseif ARGV[3] ~= '1' then
    return {'FENCED', string.sub(seen, cut + 1)}
  end
end
local added = 0
local at = 4
while at <= #ARGV do
  local strings = tonumber(ARGV[at + 1])
  if tonumber(ARGV[at]) > tonumber(last) then
    redis.call('XADD', KEYS[2], '*', unpack(ARGV, at + 2, at + 1 + strings))
    last = ARGV[at]
    added = added + 1
  end
  at = at + 2 + strings
end
redis.call('HSET', KEYS[1], ARGV[1], last .. ':' .. ARGV[2])
return {'OK', tostring(added)}
"""

COMMIT = """
-- KEYS lease, state, decisions. ARGV lease value, epoch, number before, number, cursor,
-- number of state strings, strings, number of dropped fields, fields, then for each decision: number of
-- strings, strings. The server undoes nothing of a script that fails: what it may refuse, an entry, is first.
local before = redis.call('HMGET', KEYS[2], 'commit', 'epoch', 'tail')
local commit, epoch, tail = before[1] or '0', before[2] or '0', before[3] or '0-0'
if redis.call('GET', KEYS[1]) ~= ARGV[1] or commit ~= ARGV[3] or tonumber(epoch) > tonumber(ARGV[2]) then
  return {'REFUSED', epoch, commit, tail}
end
local strings = tonumber(ARGV[6])
local dropped = tonumber(ARGV[7 + strings])
local at = 8 + strings + dropped
while at <= #ARGV do
  local n = tonumber(ARGV[at])
  tail = redis.call('XADD', KEYS[3], '*', 'after', tail, unpack(ARGV, at + 1, at + n))
  at = at + 1 + n
end
if strings > 0 then
  redis.call('HSET', KEYS[2], unpack(ARGV, 7, 6 + strings))
end
if dropped > 0 then
  redis.call('HDEL', KEYS[2], unpack(ARGV, 8 + strings, 7 + strings + dropped))
end
redis.call('HSET', KEYS[2], 'commit', ARGV[4], 'epoch', ARGV[2], 'cursor', ARGV[5], 'tail', tail)
return {'OK', ARGV[2], ARGV[4], tail}
"""

TAKE = """
-- KEYS lease, epoch, state. ARGV holder, milliseconds, floor. A free lease is taken under a new epoch.
local held = redis.call('GET', KEYS[1])
if held then
  return {'HELD', held}
end
local time = redis.call('TIME')
local epoch = math.max(
  tonumber(redis.call('GET', KEYS[2]) or '0') + 1,
  tonumber(redis.call('HGET', KEYS[3], 'epoch') or '0') + 1,
  tonumber(ARGV[3]) + 1,
  tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
local text = string.format('%.0f', epoch)
redis.call('SET', KEYS[2], text)
redis.call('SET', KEYS[1], text .. ':' .. ARGV[1], 'PX', ARGV[2])
return {'OK', text}
"""

RENEW = """
-- KEYS lease. ARGV lease value, milliseconds. Written anew, so that a server whose memory is full refuses
-- this like every other write: who cannot commit, and sees no pulse that others cannot write, holds no job.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

RELEASE = """
-- KEYS lease. ARGV lease value.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
return redis.call('DEL', KEYS[1])
"""

TRIM = """
-- KEYS lease, state, facts, decisions. ARGV lease value, entries to keep.
-- Facts that are not committed yet are never trimmed; decisions may be: whoever misses one reads the state.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return -1
end
local keep = tonumber(ARGV[2])
local cursor = redis.call('HGET', KEYS[2], 'cursor') or '0-0'
local gone = 0
if redis.call('XLEN', KEYS[3]) > keep then
  local unread = redis.call('XRANGE', KEYS[3], '(' .. cursor, '+', 'COUNT', keep)
  if #unread < keep then
    gone = redis.call('XTRIM', KEYS[3], 'MAXLEN', '~', keep)
  end
end
return gone + redis.call('XTRIM', KEYS[4], 'MAXLEN', '~', keep)
"""

FORGET = """
-- KEYS lease, seen, pulse. ARGV lease value, then for each source: its name and its value in `seen` as it was
-- read, empty for none. One that has spoken since stays.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return -1
end
local gone = 0
for at = 2, #ARGV, 2 do
  if (redis.call('HGET', KEYS[2], ARGV[at]) or '') == ARGV[at + 1] then
    redis.call('HDEL', KEYS[2], ARGV[at])
    gone = gone + math.max(1, redis.call('HDEL', KEYS[3], ARGV[at]))
  end
end
return gone
"""

ISSUE_RUN = """
-- KEYS run. ARGV floor. Never a number that was issued before, also after a rollback of the bus.
local time = redis.call('TIME')
local run = math.max(
  tonumber(redis.call('GET', KEYS[1]) or '0') + 1,
  tonumber(ARGV[1]) + 1,
  tonumber(time[1]))
local text = string.format('%.0f', run)
redis.call('SET', KEYS[1], text)
return text
"""

GLANCE = """
-- KEYS state, lease, facts, parked. ARGV most. Reads only: where the job stands, who holds it, and how many
-- facts (up to `most`) no commit has consumed yet.
local at = redis.call('HMGET', KEYS[1], 'commit', 'epoch', 'tail', 'cursor')
local behind = redis.call('XRANGE', KEYS[3], '(' .. (at[4] or '0-0'), '+', 'COUNT', ARGV[1])
local lease, left = redis.call('GET', KEYS[2]), redis.call('PTTL', KEYS[2])
local parked = redis.call('XLEN', KEYS[4])
return {at[1] or '0', at[2] or '0', at[3] or '0-0', lease or '', left, parked, #behind}
"""

FIND = """
-- KEYS stream. ARGV after, most, types. Reads only: looks at up to `most` entries behind `after`; how many
-- there were, the id of the last one, and those of these types.
local wanted, found = {}, {}
for at = 3, #ARGV do wanted[ARGV[at]] = true end
local entries = redis.call('XRANGE', KEYS[1], '(' .. ARGV[1], '+', 'COUNT', ARGV[2])
for _, entry in ipairs(entries) do
  for at = 1, #entry[2], 2 do
    if entry[2][at] == 'type' and wanted[entry[2][at + 1]] then found[#found + 1] = entry end
  end
end
return {#entries, #entries > 0 and entries[#entries][1] or ARGV[1], found}
"""
