"""How ``selective_scan_chunked`` lays out a chunk of time, and cuts it into blocks that a cache holds.

Axes: b batch, t time, g groups, r rows (b g), l places of a chunk, n states a channel, c channels (inside: of a group).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtf.ops.passes_op import Call
from hybridtf.ops.spans import span_budget


def rows_of(call: Call) -> tuple[int, int]:
    """Batch and groups."""
    return call["x"].shape[0], call["B"].shape[2]


def lay(call: Call, z: Tensor, dtype: torch.dtype) -> Tensor:
    """``z`` (b l g*width or b l g width) of a chunk as (l r width)."""
    b, g = rows_of(call)
    return z.transpose(0, 1).to(dtype).reshape(z.shape[1], b * g, z.shape[2:].numel() // g).contiguous()


def load(call: Call, name: str, dtype: torch.dtype) -> Tensor:
    """The same of a tensor of a chunk by its name, zero at pads."""
    z: Tensor = call[name]
    if call.masks is not None:
        z = z.masked_fill(~call.masks.real.view(*z.shape[:2], *[1] * (z.ndim - 2)), 0)
    return lay(call, z, dtype)


def unload(part: Tensor, like: Tensor) -> Tensor:
    """A chunk (l r width) back as (b l ...), as ``like`` is."""
    return part.reshape(len(part), like.shape[0], *like.shape[2:]).transpose(0, 1)


def stays(call: Call, dtype: torch.dtype) -> Tensor | None:
    """(l r 1 1): 0 where a document begins that the state before does not belong to, else 1."""
    if call.masks is None:
        return None
    return (~call.masks.starts.T).to(dtype).repeat_interleave(rows_of(call)[1], dim=1)[..., None, None]


def by_row(z: Tensor, b: int, g: int, dtype: torch.dtype) -> Tensor:
    """A parameter (g*c) or (g*c n) as (r c) or (r n c), for each row of the batch."""
    part: Tensor = z.to(dtype).reshape(g, z.shape[0] // g, *z.shape[1:]).movedim(1, -1)
    return part.expand(b, *part.shape).reshape(b * g, *part.shape[1:]).contiguous()


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
    budget = span_budget(device)
    wide = max(1, min(channels, budget // max(1, length * n)))
    high = max(1, budget // max(1, length * n * wide))
    for row in range(0, rows, high):
        for channel in range(0, channels, wide):
            yield Block(slice(row, row + high), slice(channel, channel + wide))
