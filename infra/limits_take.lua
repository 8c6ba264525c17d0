-- Take a request's part of every limit, or nothing at all.
-- KEYS: the reservation; those not settled (request id -> when it was last looked at); then for each scope:
--       requests of the minute, tokens of the minute, permits (request id -> when it lapses), enqueued requests
--       (as permits), their tokens (request id -> tokens, and "sum"), the day.
-- ARGV: request id, tokens, lapse (ms), names of the scopes (for who settles), number of ended requests, their
--       ids; then for each scope the limits: requests/minute, tokens/minute, concurrent, requests/day, tokens/day,
--       enqueued tokens; -1 = none.
-- Returns {0} and facts when taken, {kind of limit (1 to 6), retry (ms, -1 = never), facts, ids held}: the
-- oldest requests that fill a scope, where nothing but their end is waited for.
-- Facts: for requests and for tokens of the tightest scope: limit (-1 = none), remaining, reset (ms).
local FIRST, SCOPE_KEYS, KINDS, MINUTE, DAY = 2, 6, 6, 60, 86400
local request, tokens, lapse = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local ended = tonumber(ARGV[5])
local time = redis.call('TIME')
local now = tonumber(time[1])
local now_ms = now * 1000 + math.floor(tonumber(time[2]) / 1000)
local day = math.floor(now / DAY)

local function dequeue(queue, held, id)
  if redis.call('ZREM', queue, id) == 1 then
    local had = tonumber(redis.call('HGET', held, id) or 0)
    redis.call('HDEL', held, id)
    redis.call('HINCRBY', held, 'sum', -had)
  end
end

-- The buckets of the last minute, oldest first. A bucket is a second, and counts until all of it is a minute
-- old, so that no minute ever sees more than the limit.
local function window(key)
  local flat, sum, buckets = redis.call('HGETALL', key), 0, {}
  for i = 1, #flat, 2 do
    local second, count = tonumber(flat[i]), tonumber(flat[i + 1])
    if second < now - MINUTE then
      redis.call('HDEL', key, flat[i])
    elseif count ~= 0 then
      sum = sum + count
      buckets[#buckets + 1] = { second, count }
    end
  end
  table.sort(buckets, function(a, b) return a[1] < b[1] end)
  return sum, buckets
end

local function gone_at(bucket)
  return (bucket[1] + MINUTE + 1) * 1000 - now_ms
end

local function wait_for(sum, buckets, need, limit)
  for _, bucket in ipairs(buckets) do
    sum = sum - bucket[2]
    if sum + need <= limit then return gone_at(bucket) end
  end
  return MINUTE * 1000
end

local kind, retry, holding, only_ends = 0, 0, {}, true
local function refuse(which, ms)
  only_ends = false
  if retry ~= -1 and (kind == 0 or ms == -1 or ms > retry) then kind, retry = which, ms end
end

-- Only the end of another request brings room: which ones to look at, the longest there first. Few enough for a
-- caller that does not stop asking; where more have a permit, settlement frees those that are not looked at.
local function full(which, set)
  local others = only_ends
  refuse(which, 1000)
  only_ends = others
  for _, id in ipairs(redis.call('ZRANGE', set, 0, 63)) do holding[#holding + 1] = id end
end

local facts = { { -1, 0, 0 }, { -1, 0, 0 } }
local function tightest(which, limit, sum, buckets)
  local left = math.max(0, limit - sum)
  if facts[which][1] < 0 or left < facts[which][2] then
    local reset = #buckets > 0 and gone_at(buckets[#buckets]) or 0
    facts[which] = { limit, left, reset }
  end
end

local known = redis.call('EXISTS', KEYS[1]) == 1
local scopes = (#KEYS - FIRST) / SCOPE_KEYS
local limits = 5 + ended
for s = 0, scopes - 1 do
  local k, l = FIRST + s * SCOPE_KEYS, limits + s * KINDS
  local requests_key, tokens_key, permits, queue, held, day_key = unpack(KEYS, k + 1, k + SCOPE_KEYS)
  local per_minute, tokens_per_minute = tonumber(ARGV[l + 1]), tonumber(ARGV[l + 2])
  local concurrent, per_day = tonumber(ARGV[l + 3]), tonumber(ARGV[l + 4])
  local tokens_per_day, enqueued = tonumber(ARGV[l + 5]), tonumber(ARGV[l + 6])
  if per_minute >= 0 then
    local sum, buckets = window(requests_key)
    if sum + 1 > per_minute then refuse(1, wait_for(sum, buckets, 1, per_minute)) end
    tightest(1, per_minute, sum, buckets)
  end
  if tokens_per_minute >= 0 then
    local sum, buckets = window(tokens_key)
    if tokens > tokens_per_minute then
      refuse(2, -1)
    elseif sum + tokens > tokens_per_minute then
      refuse(2, wait_for(sum, buckets, tokens, tokens_per_minute))
    end
    tightest(2, tokens_per_minute, sum, buckets)
  end
  if concurrent >= 0 then
    redis.call('ZREMRANGEBYSCORE', permits, '-inf', now_ms)
    for e = 1, ended do redis.call('ZREM', permits, ARGV[5 + e]) end
    if redis.call('ZCARD', permits) + 1 > concurrent then full(3, permits) end
  end
  if enqueued >= 0 then
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', queue, '-inf', now_ms)) do dequeue(queue, held, id) end
    for e = 1, ended do dequeue(queue, held, ARGV[5 + e]) end
    if tokens > enqueued then
      refuse(6, -1)
    elseif tonumber(redis.call('HGET', held, 'sum') or 0) + tokens > enqueued then
      full(6, queue)
    end
  end
  local to_midnight = (day + 1) * DAY * 1000 - now_ms
  if per_day >= 0 and tonumber(redis.call('HGET', day_key, day .. ':r') or 0) + 1 > per_day then
    refuse(4, to_midnight)
  end
  if tokens_per_day >= 0 then
    if tokens > tokens_per_day then
      refuse(5, -1)
    elseif tonumber(redis.call('HGET', day_key, day .. ':t') or 0) + tokens > tokens_per_day then
      refuse(5, to_midnight)
    end
  end
end
if known then
  return { 0, 0, facts, {} } -- taken before: the answer was lost on its way
end
if kind ~= 0 then
  return { kind, retry, facts, only_ends and holding or {} }
end

local function keep(key, ms)
  if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, ms) end
end

local took = '' -- of each scope: 1 requests of the minute, 2 its tokens, 4 the day, added up
for s = 0, scopes - 1 do
  local k, l = FIRST + s * SCOPE_KEYS, limits + s * KINDS
  local requests_key, tokens_key, permits, queue, held, day_key = unpack(KEYS, k + 1, k + SCOPE_KEYS)
  local parts = 0
  if tonumber(ARGV[l + 1]) >= 0 then
    parts = 1
    redis.call('HINCRBY', requests_key, now, 1)
    keep(requests_key, (MINUTE + 2) * 1000)
  end
  if tonumber(ARGV[l + 2]) >= 0 then
    parts = parts + 2
    redis.call('HINCRBY', tokens_key, now, tokens)
    keep(tokens_key, (MINUTE + 2) * 1000)
  end
  if tonumber(ARGV[l + 3]) >= 0 then
    redis.call('ZADD', permits, now_ms + lapse, request)
    keep(permits, lapse)
  end
  if tonumber(ARGV[l + 6]) >= 0 then
    redis.call('ZADD', queue, now_ms + lapse, request)
    redis.call('HSET', held, request, tokens)
    redis.call('HINCRBY', held, 'sum', tokens)
    keep(queue, lapse)
    keep(held, lapse)
  end
  if tonumber(ARGV[l + 4]) >= 0 or tonumber(ARGV[l + 5]) >= 0 then
    parts = parts + 4
    redis.call('HINCRBY', day_key, day .. ':r', 1)
    redis.call('HINCRBY', day_key, day .. ':t', tokens)
    redis.call('HDEL', day_key, (day - 2) .. ':r', (day - 2) .. ':t')
    keep(day_key, 2 * DAY * 1000)
  end
  took = took .. parts
end
redis.call(
  'HSET', KEYS[1], 'second', now, 'day', day, 'tokens', tokens, 'scopes', ARGV[4], 'took', took
)
redis.call('ZADD', KEYS[2], now_ms, request)
keep(KEYS[1], lapse)
keep(KEYS[2], lapse)
if facts[1][1] >= 0 then
  facts[1] = { facts[1][1], facts[1][2] - 1, (MINUTE + 1) * 1000 - now_ms % 1000 }
end
if facts[2][1] >= 0 then
  facts[2] = { facts[2][1], facts[2][2] - tokens, (MINUTE + 1) * 1000 - now_ms % 1000 }
end
return { 0, 0, facts, {} }
