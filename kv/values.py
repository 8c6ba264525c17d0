"""One value of the tier: saved unless it is there, loaded only if it is what it should be."""

from __future__ import annotations

from .codec import Header, verified
from .errors import ChunkRejected
from .store import ChunkStore


def save_value(
    store: ChunkStore, key: str, header: Header, payload: memoryview, ttl_ms: int, seconds: float
) -> bool:
    """Store a value unless it is there already, which then lives on; whether it was sent.

    Args:
        header: without the checksum.
        seconds: deadline of each of the two calls.

    Raises:
        TierUnavailable: no answer, or a refusal.
    """
    if store.touch([key], ttl_ms, seconds)[0]:
        return False
    store.write(key, (header.sealed((payload,)).pack(), payload), ttl_ms, seconds)
    return True


def load_value(
    store: ChunkStore, key: str, expected: Header, into: memoryview, seconds: float
) -> memoryview:
    """Read a value into a buffer; its payload there.

    Args:
        expected: everything but the checksum.

    Raises:
        ChunkRejected: it is not there (``evicted``), or is not what it should be and has been deleted.
        TierUnavailable: no answer.
    """
    size = store.read(key, into, seconds)
    if size is None:
        raise ChunkRejected("evicted")
    try:
        if size > len(into):
            raise ChunkRejected("length")
        return verified(into[:size], expected)
    except ChunkRejected:
        store.delete(key, seconds)  # or it would be found again, and never be saved anew
        raise
