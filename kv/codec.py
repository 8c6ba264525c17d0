"""What is stored for a chunk: a header with lengths, shape and checksum, then the raw blocks."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from .errors import ChunkRejected
from .layout import FORMAT

_MAGIC = b"HRKV"
_DIMS = 6
_STRUCT = struct.Struct(f"<4sHBB16s8sIHHQI{_DIMS}I16s12x")
#: Bytes of a header.
HEADER_BYTES = _STRUCT.size
#: How the blocks are written, by the number in the header.
ENCODINGS = ("raw", "fp8")


@dataclass(frozen=True, slots=True)
class Header:
    """Describes the bytes that follow it: ``[layers][blocks][*block_shape]`` of ``dtype``.

    Attributes:
        name: of the chunk.
        namespace: digest.
        tokens: of the chunk.
        layers: of this rank.
        blocks: engine blocks of the chunk.
        block_shape: of one block in one layer, at most 6 dimensions.
        dtype: of the engine's cache.
        encoding: one of :data:`ENCODINGS`.
        payload_bytes: bytes that follow.
        checksum: CRC-32 of them.
    """

    name: bytes
    namespace: bytes
    tokens: int
    layers: int
    blocks: int
    block_shape: tuple[int, ...]
    dtype: str
    encoding: str
    payload_bytes: int
    checksum: int = 0

    def pack(self) -> bytes:
        """:data:`HEADER_BYTES` bytes."""
        dims = (*self.block_shape, *(0,) * (_DIMS - len(self.block_shape)))
        return _STRUCT.pack(
            _MAGIC,
            FORMAT,
            ENCODINGS.index(self.encoding),
            len(self.block_shape),
            self.name,
            self.namespace,
            self.tokens,
            self.layers,
            self.blocks,
            self.payload_bytes,
            self.checksum,
            *dims,
            self.dtype.encode(),
        )

    @classmethod
    def unpack(cls, value: bytes | memoryview) -> Self:
        """Read the header of a value.

        Raises:
            ChunkRejected: ``truncated``, ``format`` (no such value of ours), or ``version``.
        """
        if len(value) < HEADER_BYTES:
            raise ChunkRejected("truncated")
        magic, version, encoding, rank, name, namespace, *rest = _STRUCT.unpack_from(value)
        tokens, layers, blocks, payload, checksum, *dims, dtype = rest
        if magic != _MAGIC:
            raise ChunkRejected("format")
        if version != FORMAT:
            raise ChunkRejected("version")
        if encoding >= len(ENCODINGS) or rank > _DIMS:
            raise ChunkRejected("format")
        return cls(
            name,
            namespace,
            tokens,
            layers,
            blocks,
            tuple(dims[:rank]),
            dtype.rstrip(b"\0").decode("ascii", "replace"),
            ENCODINGS[encoding],
            payload,
            checksum,
        )

    def sealed(self, payload: Sequence[bytes | memoryview]) -> Header:
        """With the checksum of ``payload``, which may be in parts."""
        return replace(self, checksum=_checksum(payload))


def verified(value: memoryview, expected: Header) -> memoryview:
    """The payload of a value that is what was expected.

    Args:
        expected: everything but the checksum.

    Raises:
        ChunkRejected: ``truncated``, ``format``, ``version``, ``name``, ``shape``, ``length`` or
            ``checksum``.
    """
    found = Header.unpack(value)
    if (found.name, found.namespace) != (expected.name, expected.namespace):
        raise ChunkRejected("name")
    if replace(found, checksum=0, payload_bytes=expected.payload_bytes) != expected:
        raise ChunkRejected("shape")
    payload = value[HEADER_BYTES:]
    if not len(payload) == found.payload_bytes == expected.payload_bytes:
        raise ChunkRejected("length")
    if _checksum((payload,)) != found.checksum:
        raise ChunkRejected("checksum")
    return payload


def _checksum(parts: Sequence[bytes | memoryview]) -> int:
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc
