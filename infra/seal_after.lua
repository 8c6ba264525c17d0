-- Append a terminal entry only if the stream's last id is the expected one.
-- KEYS[1] stream; ARGV[1] expected last id; ARGV[2] id of the seal; ARGV[3..] fields.
-- The seal is larger than every id, so the id rule alone would let a worker seal a reply that another has
-- taken over. Answers as XADD does: the id, nil without a stream, or XADD's own words for a refusal.
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if not last then
  return nil
end
if last[1] ~= ARGV[1] and last[1] ~= ARGV[2] then
  return redis.error_reply('ERR the expected id is not equal or smaller: the stream has moved on')
end
return redis.call('XADD', KEYS[1], 'NOMKSTREAM', ARGV[2], unpack(ARGV, 3))
