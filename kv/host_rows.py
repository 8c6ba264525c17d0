"""Rows of a buffer on the host, one chunk each, as values of the tier."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from .codec import HEADER_BYTES, Header
from .layout import Chunk
from .store import ChunkStore
from .values import load_value, save_value


@dataclass(frozen=True, slots=True)
class Row:
    """Where a chunk is in the buffer, or will be.

    Attributes:
        key: what the buffer's owner calls it.
        chunk: what the tier calls it.
        index: of the row.
    """

    key: bytes
    chunk: Chunk
    index: int


class HostRows:
    """Moves rows to the tier and back; what is in them is the owner's affair.

    A value is read beside the buffer and copied into its row when it is known to be right. Of any thread.
    """

    def __init__(
        self,
        buffer: memoryview,
        namespace: bytes,
        *,
        tokens: int,
        loads: ChunkStore,
        saves: ChunkStore,
        ttl_ms: int,
    ) -> None:
        """Rows of ``buffer``, which has the shape ``[rows][bytes]``.

        Args:
            namespace: digest.
            tokens: of a row.
            loads / saves: stores, as each thread needs a connection.
        """
        self._rows = np.asarray(buffer).view(np.uint8)
        self._namespace = namespace
        self._tokens = tokens
        self._loads = loads
        self._saves = saves
        self._ttl_ms = ttl_ms
        self._own = threading.local()

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return int(self._rows.shape[1])

    def save(self, row: Row, seconds: float) -> int:
        """Store a row unless it is there already, which then lives on; bytes sent.

        Raises:
            TierUnavailable: no answer, or a refusal.
        """
        key = row.chunk.key(self._namespace)
        payload = memoryview(self._rows[row.index])
        header = self._header(row.chunk)
        sent = save_value(self._saves, key, header, payload, self._ttl_ms, seconds)
        return len(payload) if sent else 0

    def load(self, row: Row, seconds: float) -> int:
        """Fill a row; bytes that came.

        Raises:
            ChunkRejected: it is not there, or is not what it should be and has been deleted. The row is as
                it was.
            TierUnavailable: no answer.
        """
        key = row.chunk.key(self._namespace)
        expected = self._header(row.chunk)
        payload = load_value(self._loads, key, expected, self._staging(), seconds)
        self._rows[row.index] = np.frombuffer(payload, np.uint8)
        return len(payload)

    def release(self) -> None:
        """Let go of the buffer; nothing may be moving."""
        del self._rows

    def _staging(self) -> memoryview:
        """Room for one value, of this thread."""
        if not hasattr(self._own, "value"):
            self._own.value = memoryview(bytearray(HEADER_BYTES + self.row_bytes))
        value: memoryview = self._own.value
        return value

    def _header(self, chunk: Chunk) -> Header:
        size = self.row_bytes
        return Header(chunk.name, self._namespace, self._tokens, 1, 1, (size,), "uint8", "raw", size)
