"""``grouped_linear`` by batched products of equal blocks, for what torch's grouped product does not take.

The rows of each group are cut into blocks of equal size, the last one filled up with zeros, and each block meets its
group's weights in one batched product. With as many rows in a block as a group has on average, there are at most twice
as many blocks as groups, whatever the loads: work and memory are bounded. Few rows give blocks of one row, and then only
the weights of groups that have rows are read.

Axes: s rows, e groups, i inputs, o outputs, n blocks, m rows of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Blocks(NamedTuple):
    """``groups`` (n): whose weights a block meets; ``rows`` (n m): its rows of x; ``real`` (n m): no filling."""

    groups: Tensor
    rows: Tensor
    real: Tensor

    def take(self, x: Tensor) -> Tensor:
        """The rows of ``x`` in blocks (n m i), filling as zeros."""
        found = x.index_select(0, self.rows.flatten()).view(*self.rows.shape, x.shape[1])
        return found.masked_fill(~self.real[..., None], 0)


def block_size(n_rows: int, n_groups: int) -> int:
    """The power of two from the average load up."""
    return int(2 ** max(0, (-(-n_rows // n_groups) - 1).bit_length()))


def make_blocks(ends: Tensor, n_rows: int) -> Blocks:
    """The blocks of all groups, in order; waits for the device, since their number follows the loads."""
    ends = ends.long()
    size = block_size(n_rows, ends.shape[0])
    loads = torch.diff(ends, prepend=ends.new_zeros(1))
    counts = (loads + size - 1) // size
    total = int(counts.sum())
    groups = torch.repeat_interleave(torch.arange(ends.shape[0], device=ends.device), counts, output_size=total)
    within = torch.arange(total, device=ends.device) - (counts.cumsum(0) - counts)[groups]
    rows = ((ends - loads)[groups] + within * size)[:, None] + torch.arange(size, device=ends.device)
    real = rows < ends[groups][:, None]
    return Blocks(groups, rows.clamp(max=n_rows - 1), real)


def linear_blocks(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x (s i) and weight (e i o) to (s o)."""
    blocks = make_blocks(ends, x.shape[0])
    y = torch.bmm(blocks.take(x), weight.index_select(0, blocks.groups).to(x.dtype))
    real = blocks.real.flatten()
    out = x.new_zeros(x.shape[0], weight.shape[2])
    return out.index_copy_(0, blocks.rows.flatten()[real], y.flatten(0, 1)[real])


def outer_blocks(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """x (s i) and grad (s o) to the sum of outer products over the rows of each group (e i o)."""
    blocks = make_blocks(ends, x.shape[0])
    parts = torch.bmm(blocks.take(x).transpose(1, 2), blocks.take(grad))
    return x.new_zeros(ends.shape[0], x.shape[1], grad.shape[1]).index_add_(0, blocks.groups, parts)
