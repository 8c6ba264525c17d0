"""Every way this server closes a websocket, in one table: the code, and what a client does next.

What a client sees without a close frame (1006, a lost connection) means reconnect too.
A client that reconnects subscribes again with its last offset, and waits a little longer after each
failure.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Close(NamedTuple):
    """One row.

    Attributes:
        code: websocket close code.
        reason: sent with it, for people.
        reconnect: whether a client should come back by itself; else it would meet the same end.
    """

    code: int
    reason: str
    reconnect: bool


class CloseCase(Enum):
    """The table."""

    RESTART = Close(1012, "the server restarts: reconnect at your offset", reconnect=True)
    TOO_SLOW = Close(1013, "nothing was taken for too long: reconnect at your offset", reconnect=True)
    #: A bug of ours, or (sent by the protocol layer) no answer to a ping.
    INTERNAL = Close(1011, "internal error: reconnect at your offset", reconnect=True)
    TOO_MANY_FRAMES = Close(4429, "too many frames", reconnect=True)
    AUTH_TIMEOUT = Close(4408, "not authenticated in time", reconnect=False)
    INVALID_API_KEY = Close(4401, "invalid API key", reconnect=False)
    #: Sent by the protocol layer, for a frame too large even to be answered with an error frame.
    FRAME_TOO_BIG = Close(1009, "frame too big", reconnect=False)
    #: Sent by the protocol layer, for a text frame that is not UTF-8.
    NOT_UTF8 = Close(1007, "text is not UTF-8", reconnect=False)
