-- Replace what a request has reserved by what it has used, once.
-- KEYS: as of limits_take.lua. ARGV: request id, tokens used, "undo" if it was never accepted.
-- Returns 1, or 0 if there is nothing (any more) to settle.
local FIRST, SCOPE_KEYS = 2, 6
local reserved = redis.call('HMGET', KEYS[1], 'second', 'day', 'tokens', 'took')
redis.call('ZREM', KEYS[2], ARGV[1])
if not reserved[1] then return 0 end
redis.call('DEL', KEYS[1])
local second, day, undo = reserved[1], reserved[2], ARGV[3] == 'undo'
local difference = tonumber(ARGV[2]) - tonumber(reserved[3])

-- Only what was taken (limits may have come since) and is still there: a bucket that has passed must not come
-- back, nor a key without a lifetime.
local function add(took, key, field, count)
  if took and count ~= 0 and redis.call('HEXISTS', key, field) == 1 then redis.call('HINCRBY', key, field, count) end
end

for k = FIRST, #KEYS - 1, SCOPE_KEYS do
  local requests_key, tokens_key, permits, queue, held, day_key = unpack(KEYS, k + 1, k + SCOPE_KEYS)
  local s = (k - FIRST) / SCOPE_KEYS + 1
  local took = tonumber(string.sub(reserved[4], s, s))
  add(took % 4 >= 2, tokens_key, second, difference)
  add(took >= 4, day_key, day .. ':t', difference)
  if undo then
    add(took % 2 == 1, requests_key, second, -1)
    add(took >= 4, day_key, day .. ':r', -1)
  end
  redis.call('ZREM', permits, ARGV[1])
  if redis.call('ZREM', queue, ARGV[1]) == 1 then
    add(true, held, 'sum', -tonumber(redis.call('HGET', held, ARGV[1]) or 0))
    redis.call('HDEL', held, ARGV[1])
  end
end
return 1
