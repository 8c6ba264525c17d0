"""How token sequences are cut and named for the KV cache: chunks of tokens, chained hashes, Redis keys."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass

#: Tokens of one chunk, unless ``kv.chunk_tokens`` says otherwise: 16 vLLM blocks of 16 tokens.
CHUNK_TOKENS = 256
#: Version of names, keys and values; another one finds nothing of this one.
FORMAT = 1
#: Chunks of a prefix that are sure to be on one node of a Redis cluster.
CHUNKS_PER_NODE = 8

_SHARED_ROOT = hashlib.blake2b(b"", digest_size=16, person=b"headrace-shared").digest()


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal for KV blocks to be exchangeable; see ``docs/KV_CACHE.md``.

    Attributes:
        model: canonical name.
        revision: its revision, as clients are shown it.
        weights: fingerprint of its files (:func:`kv.fingerprint.weights_fingerprint`).
        dtype: of the cache in the engine.
        layout: order of a block's dimensions.
        block_tokens: tokens of an engine block.
        chunk_tokens: tokens of a full chunk.
        tensor_parallel / pipeline_parallel: sizes.
        rank: which part of the model's heads and layers.
        encoding: how values are written (:mod:`kv.codec`).
    """

    model: str
    revision: str
    weights: str
    dtype: str
    layout: str
    block_tokens: int
    chunk_tokens: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    rank: int = 0
    encoding: str = "raw"

    def digest(self) -> bytes:
        """8 bytes; also changes with :data:`FORMAT`."""
        fields = json.dumps([FORMAT, asdict(self)], sort_keys=True)
        return hashlib.blake2b(fields.encode(), digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of tokens within a sequence, named by itself and all that comes before it.

    Attributes:
        name: 16 bytes; equal names mean equal tokens from the start, and the same salt.
        tag: hash tag of its keys.
        start / end: positions of its tokens.
        full: as long as chunks are; only the last one of a sequence may be shorter.
    """

    name: bytes
    tag: str
    start: int
    end: int
    full: bool

    def key(self, namespace: bytes) -> str:
        """Its Redis key; ``namespace`` is a :meth:`Namespace.digest`."""
        return f"kv:{{{self.tag}}}:{namespace.hex()}:{self.name.hex()}"


class Chain:
    """Names the chunks of one token sequence, which may grow.

    The chunks of a prompt that its operator declared shareable are named alike for all tenants; from the
    first chunk on that is not wholly part of it, the tenant is part of every name.
    """

    def __init__(
        self,
        tenant: str,
        *,
        block_tokens: int,
        chunk_tokens: int = CHUNK_TOKENS,
        shared_tokens: int = 0,
    ) -> None:
        """A chain for ``tenant`` (as the server knows it, never as a request says).

        Args:
            shared_tokens: how many tokens, from the first on, belong to a shareable prompt.
        """
        self._tenant = hashlib.blake2b(
            tenant.encode(), digest_size=16, person=b"headrace-tenant"
        ).digest()
        self._block = block_tokens
        self._chunk = chunk_tokens
        self._shared = shared_tokens // chunk_tokens
        self._names: list[bytes] = []
        self._tags: list[str] = []

    def full(self, tokens: Sequence[int], index: int) -> Chunk:
        """Full chunk ``index`` of a sequence that has at least so many tokens."""
        while len(self._names) <= index:
            self._name_next(tokens)
        start = index * self._chunk
        tag = self._tags[index // CHUNKS_PER_NODE]
        return Chunk(self._names[index], tag, start, start + self._chunk, full=True)

    def tail(self, tokens: Sequence[int], index: int, end: int) -> Chunk:
        """The run from the start of chunk ``index`` to ``end``, which is less than a chunk further.

        It is never shared between tenants.
        """
        while len(self._names) < index:
            self._name_next(tokens)
        start = index * self._chunk
        base = self._base(index)
        if index < self._shared:
            base = _digest(base, self._tenant)
        name = _digest(base, _bytes(tokens, start, end))
        return Chunk(name, self._tag(tokens, index), start, end, full=False)

    def _name_next(self, tokens: Sequence[int]) -> None:
        index = len(self._names)
        start = index * self._chunk
        self._tag(tokens, index)
        self._names.append(_digest(self._base(index), _bytes(tokens, start, start + self._chunk)))

    def _base(self, index: int) -> bytes:
        """What the name of chunk ``index`` starts from."""
        if index == 0:
            return _SHARED_ROOT if self._shared else self._tenant
        parent = self._names[index - 1]
        return _digest(parent, self._tenant) if index == self._shared else parent

    def _tag(self, tokens: Sequence[int], index: int) -> str:
        """Named by the first block of its group of chunks, so that tenants spread over a cluster."""
        group = index // CHUNKS_PER_NODE
        if group == len(self._tags):
            first = group * CHUNKS_PER_NODE
            start = first * self._chunk
            block = _bytes(tokens, start, start + self._block)
            self._tags.append(_digest(self._base(first), block)[:8].hex())
        return self._tags[group]


def prefix_hashes(
    token_ids: Sequence[int],
    tenant: str,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    shared_tokens: int = 0,
) -> list[str]:
    """Names of a prompt's full chunks, for routing: equal name, equal tokens from the start of the prompt.

    Args:
        token_ids: a prompt; a last chunk that is not full has no name.
        tenant: as the server knows it.
        chunk_tokens: tokens per chunk.
        shared_tokens: see :class:`Chain`.

    Returns:
        One 32-digit hex string per full chunk, in order.
    """
    chain = Chain(tenant, block_tokens=1, chunk_tokens=chunk_tokens, shared_tokens=shared_tokens)
    return [chain.full(token_ids, i).name.hex() for i in range(len(token_ids) // chunk_tokens)]


def _bytes(tokens: Sequence[int], start: int, end: int) -> bytes:
    return array("I", tokens[start:end]).tobytes()


def _digest(base: bytes, more: bytes) -> bytes:
    return hashlib.blake2b(base + more, digest_size=16).digest()
