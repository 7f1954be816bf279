"""How ``selective_scan_chunked`` cuts a call into chunks of time, and a chunk into blocks that a cache holds.

Axes: b batch, t time, g groups, r rows (b g), l places of a chunk, n states a channel, c channels (inside: of a group).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Elements (l r n c) that are computed side by side: few on a CPU, whose cache holds them, enough to fill a GPU.
BLOCK_BUDGET = 2**18
BLOCK_BUDGET_GPU = 2**24


class Call(NamedTuple):
    """One call without its gradients: inputs (B and C as b t g n), masks (None without segments), and the chunk size."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    real: Tensor | None
    starts: Tensor | None
    chunk_size: int

    @property
    def rows(self) -> tuple[int, int]:
        """Batch and groups."""
        return self.x.shape[0], self.B.shape[2]

    def count_chunks(self) -> int:
        """As arithmetic that holds for a compiler's symbols too."""
        return (self.x.shape[1] + self.chunk_size - 1) // self.chunk_size

    def chunks(self) -> list[slice]:
        """The places in time of each chunk."""
        t = self.x.shape[1]
        return [slice(i, min(i + self.chunk_size, t)) for i in range(0, t, self.chunk_size)]

    def load(self, z: Tensor, chunk: slice, dtype: torch.dtype) -> Tensor:
        """A chunk of ``z`` (b t g*width or b t g width) as (l r width), zero at pads."""
        part = z[:, chunk]
        if self.real is not None:
            part = part.masked_fill(~self.real[:, chunk].view(*part.shape[:2], *[1] * (z.ndim - 2)), 0)
        (b, g), length = self.rows, part.shape[1]
        return part.transpose(0, 1).to(dtype).reshape(length, b * g, z.shape[2:].numel() // g).contiguous()

    def unload(self, part: Tensor, like: Tensor) -> Tensor:
        """A chunk (l r width) back as (b l ...), as a part of ``like``."""
        return part.reshape(len(part), like.shape[0], *like.shape[2:]).transpose(0, 1)

    def stays(self, chunk: slice, dtype: torch.dtype) -> Tensor | None:
        """(l r 1 1): 0 where a document begins that the state before does not belong to, else 1."""
        if self.starts is None:
            return None
        return (~self.starts[:, chunk].T).to(dtype).repeat_interleave(self.rows[1], dim=1)[..., None, None]

    def by_row(self, z: Tensor, dtype: torch.dtype) -> Tensor:
        """A parameter (g*c) or (g*c n) as (r c) or (r n c)."""
        b, g = self.rows
        part: Tensor = z.to(dtype).reshape(g, z.shape[0] // g, *z.shape[1:]).movedim(1, -1)
        return part.expand(b, *part.shape).reshape(b * g, *part.shape[1:]).contiguous()

    def over_batch(self, z: Tensor, like: Tensor) -> Tensor:
        """The gradient of a parameter: the sum of what its rows (r c) or (r n c) give, as ``like``."""
        b, g = self.rows
        return z.view(b, g, *z.shape[1:]).sum(0).movedim(-1, 1).reshape(like.shape).to(like.dtype).contiguous()


class Block(NamedTuple):
    """Rows and channels that are computed side by side."""

    rows: slice
    channels: slice

    def cut(self, z: Tensor) -> Tensor:
        """Its part of ``z`` (l r c)."""
        return z[:, self.rows, self.channels]

    def states(self, z: Tensor) -> Tensor:
        """Its part of ``z`` (r n c)."""
        return z[self.rows, :, self.channels]


def blocks_of(shape: torch.Size, n: int, device: torch.device) -> Iterator[Block]:
    """Blocks of a chunk of ``shape`` (l r c), each within the budget: first fewer rows, then fewer channels."""
    length, rows, channels = shape
    budget = BLOCK_BUDGET if device.type == "cpu" else BLOCK_BUDGET_GPU
    wide = max(1, min(channels, budget // max(1, length * n)))
    high = max(1, budget // max(1, length * n * wide))
    for row in range(0, rows, high):
        for channel in range(0, channels, wide):
            yield Block(slice(row, row + high), slice(channel, channel + wide))
