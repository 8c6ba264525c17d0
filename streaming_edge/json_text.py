"""JSON that survives readers which split on more than CR and LF.

JSON allows U+2028, U+2029 and U+0085 raw inside strings, and some line readers (Python's
``str.splitlines`` among them) take them for line ends. Escaped they are harmless everywhere; VT, FF and
the separators below U+0020 are escaped by JSON's own rules.
"""

from __future__ import annotations

from typing import Any

import orjson

_ESCAPES = (
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
    ("\u0085".encode(), b"\\u0085"),
)


def json_text(value: Any) -> bytes:
    """UTF-8 JSON of ``value`` on one line, by anyone's definition of a line."""
    raw = orjson.dumps(value)
    if b"\xe2\x80" in raw or b"\xc2\x85" in raw:
        for character, escape in _ESCAPES:
            raw = raw.replace(character, escape)
    return raw
