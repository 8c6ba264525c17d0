"""The engine's KV blocks as bytes that can be stored: copied out of and into its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from .encodings import Encoding


@dataclass(frozen=True, slots=True)
class Staged:
    """Blocks on their way out of the device.

    Attributes:
        data: encoded bytes on the host; filled when ``ready`` is reached.
        ready: a device event; None on the CPU, where the copy is made at once.
    """

    data: torch.Tensor
    ready: Any

    def bytes(self) -> memoryview:
        """The bytes; waits for the copy."""
        if self.ready is not None:
            self.ready.synchronize()
        return memoryview(self.data.numpy())


class PagedCache:
    """All layers of one rank.

    Attributes:
        layers: how many.
        block_shape: of one block in one layer.
        dtype: of the elements, as PyTorch prints it, without ``torch.``.
    """

    def __init__(self, layers: Mapping[str, torch.Tensor], encoding: Encoding) -> None:
        """A cache from what vLLM registers: per layer a view ``[blocks, *block_shape]``.

        Layers that share one tensor (cross-layer KV sharing) count once.

        Args:
            encoding: of what goes out and comes in.

        Raises:
            ValueError: the layers differ in shape, or there are none.
        """
        distinct = {(t.data_ptr(), t.storage_offset()): t for t in layers.values()}
        self._layers = list(distinct.values())
        shapes = {(tuple(t.shape[1:]), t.dtype) for t in self._layers}
        if len(shapes) != 1:
            raise ValueError("the layers of this model have KV blocks of different shapes")
        self.layers = len(self._layers)
        self.block_shape = tuple(int(n) for n in self._layers[0].shape[1:])
        self._dtype = self._layers[0].dtype
        self.dtype = str(self._dtype).removeprefix("torch.")
        self._device = self._layers[0].device
        self._cuda = self._device.type == "cuda"
        self._encoding = encoding
        self._out = torch.cuda.Stream(self._device) if self._cuda else None

    def size(self, blocks: int) -> int:
        """Encoded bytes of so many blocks in all layers."""
        return self._encoding.size((self.layers, blocks, *self.block_shape), self._dtype.itemsize)

    def gather(self, block_ids: Sequence[int]) -> Staged:
        """Copy blocks out, in the order of the device's own work: what overwrites them later, does so later.

        Returns at once on a GPU; the blocks may be given away then.
        """
        index = torch.tensor(block_ids, device=self._device)
        shape = (self.layers, len(block_ids), *self.block_shape)
        staged = torch.empty(shape, dtype=self._dtype, device=self._device)
        for layer, out in zip(self._layers, staged, strict=True):
            torch.index_select(layer, 0, index, out=out)
        staged = self._encoding.encode(staged)
        if not self._cuda:
            return Staged(staged, None)
        assert self._out is not None
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        host = torch.empty(staged.shape, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(self._out):
            host.copy_(staged, non_blocking=True)
            staged.record_stream(self._out)
            ready = torch.cuda.Event()
            ready.record(self._out)
        return Staged(host, ready)

    def buffer(self, size: int) -> torch.Tensor:
        """Bytes on the host from which :meth:`scatter` copies fast."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda)

    def stream(self) -> Any:
        """What a thread enters that calls :meth:`scatter`."""
        return torch.cuda.stream(torch.cuda.Stream(self._device)) if self._cuda else nullcontext()

    def scatter(self, data: torch.Tensor, blocks: int, skip: int, block_ids: Sequence[int]) -> None:
        """Copy a chunk in; returns when it is there.

        Args:
            data: encoded bytes of ``blocks`` blocks.
            skip: blocks at the chunk's start to leave out.
            block_ids: where the others go.
        """
        shape = (self.layers, blocks, *self.block_shape)
        data = data.to(self._device, non_blocking=True)
        source = self._encoding.decode(data, shape, self._dtype)[:, skip:]
        index = torch.tensor(block_ids, device=self._device)
        for layer, part in zip(self._layers, source, strict=True):
            layer.index_copy_(0, index, part)
        if self._cuda:
            torch.cuda.current_stream(self._device).synchronize()
