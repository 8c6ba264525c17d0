"""Breaks the fence, to show that the chaos test notices.

On the path only in runs with ``--break-fence``. In workers, and nowhere else, an append of text that Redis
refuses because another attempt has taken over is written behind the last entry instead, and the look at the
stream that would tell a worker of the takeover says that nothing has happened.
"""

from __future__ import annotations

import sys

_APPEND = """
local function add(id)
  local command = {'XADD', KEYS[1], 'NOMKSTREAM', id}
  for i = 2, #ARGV do command[#command + 1] = ARGV[i] end
  return redis.pcall(unpack(command))
end
local result = add(ARGV[1])
if type(result) == 'table' and result.err and string.find(result.err, 'equal or smaller') then
  local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1][1]
  return add(string.match(last, '^%d+') .. '-*')
end
return result
"""


def _break() -> None:
    import infra.stream_redis as streams
    import workers.leases as leases
    from contracts.entries import Text, encode_entry
    from contracts.token_stream import Appended

    fenced_xadd, true_fate = streams._xadd, leases.fate

    def xadd(pipe, request_id, entry_id, entry):  # type: ignore[no-untyped-def]
        if not isinstance(entry, Text):
            fenced_xadd(pipe, request_id, entry_id, entry)
            return
        parts = [part for pair in encode_entry(entry).items() for part in pair]
        pipe.execute_command("EVAL", _APPEND, 1, streams.stream_key(request_id), str(entry_id), *parts)

    def fate(last, attempt):  # type: ignore[no-untyped-def]
        found = true_fate(last, attempt)
        return Appended.OK if found is Appended.FENCED else found

    streams._xadd, leases.fate = xadd, fate


if "workers" in sys.orig_argv:
    _break()
