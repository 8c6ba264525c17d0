#!lua
-- Append several entries to one stream: all are tried, or none where Redis takes no writes (memory full).
-- KEYS[1] stream; ARGV for each entry: its id, the number of its names and values, these.
-- One by one, an entry could be refused and the next one taken, which would leave a hole between them.
-- Answers for each entry what XADD does: the id, nil without a stream, or an error.
local answers = {}
local at = 1
while at <= #ARGV do
  local count = tonumber(ARGV[at + 1])
  answers[#answers + 1] =
    redis.pcall('XADD', KEYS[1], 'NOMKSTREAM', ARGV[at], unpack(ARGV, at + 2, at + 1 + count))
  at = at + 2 + count
end
return answers
