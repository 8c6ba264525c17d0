"""How blocks are written: as they are, or as 8-bit floats."""

from __future__ import annotations

import math
from typing import Protocol

import torch

_FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
_SCALE_BYTES = 4


class Encoding(Protocol):
    """Blocks ``[layers][blocks][*block_shape]`` to bytes and back, on any device."""

    def size(self, shape: tuple[int, ...], element_bytes: int) -> int:
        """Bytes of blocks of this shape."""

    def encode(self, blocks: torch.Tensor) -> torch.Tensor:
        """Flat bytes of contiguous blocks."""

    def decode(self, data: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The blocks again."""


class Raw:
    """See :class:`Encoding`: exact, and nothing to compute."""

    def size(self, shape: tuple[int, ...], element_bytes: int) -> int:
        """See :class:`Encoding`."""
        return math.prod(shape) * element_bytes

    def encode(self, blocks: torch.Tensor) -> torch.Tensor:
        """See :class:`Encoding`."""
        return blocks.view(torch.uint8).view(-1)

    def decode(self, data: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See :class:`Encoding`."""
        return data.view(dtype).view(shape)


class Fp8:
    """See :class:`Encoding`: E4M3 with one float32 scale for each layer and channel of the last dimension.

    Relative error of an element: at most 1/16. Half the bytes of a 16-bit cache.
    """

    def size(self, shape: tuple[int, ...], element_bytes: int) -> int:
        """See :class:`Encoding`."""
        return shape[0] * shape[-1] * _SCALE_BYTES + math.prod(shape)

    def encode(self, blocks: torch.Tensor) -> torch.Tensor:
        """See :class:`Encoding`."""
        between = tuple(range(1, blocks.dim() - 1))
        scales = blocks.abs().amax(dim=between, keepdim=True).float() / _FP8_MAX
        scales = torch.where(scales > 0, scales, torch.ones_like(scales))
        small = (blocks / scales).to(_FP8)
        return torch.cat([scales.view(torch.uint8).view(-1), small.view(torch.uint8).view(-1)])

    def decode(self, data: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See :class:`Encoding`."""
        cut = shape[0] * shape[-1] * _SCALE_BYTES
        scales = data[:cut].view(torch.float32).view(shape[0], *(1,) * (len(shape) - 2), shape[-1])
        return (data[cut:].view(_FP8).view(shape).float() * scales).to(dtype)


#: By the names of :data:`kv.codec.ENCODINGS`.
ENCODINGS: dict[str, Encoding] = {"raw": Raw(), "fp8": Fp8()}
