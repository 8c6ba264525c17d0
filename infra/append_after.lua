#!lua flags=allow-oom
-- Append a seal or the start of an attempt, if the stream's last id is the expected one.
-- KEYS[1] stream; ARGV[1] expected last id, or * for any; ARGV[2] id of the entry; ARGV[3..] fields.
-- Their ids are larger than those of the attempts before, so the id rule alone would let a worker seal a reply
-- that another has taken over, or take over from text that is no longer all there is.
-- A full memory must not keep a request from ending: sealed streams are what makes room.
-- Answers as XADD does: the id, nil without a stream, or XADD's own words for a refusal.
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if not last then
  return nil
end
local sealed = last[1] == '18446744073709551615-18446744073709551615'
if ARGV[1] ~= '*' and last[1] ~= ARGV[1] and not sealed then
  return redis.error_reply('ERR the expected id is not equal or smaller: the stream has moved on')
end
return redis.call('XADD', KEYS[1], 'NOMKSTREAM', ARGV[2], unpack(ARGV, 3))
