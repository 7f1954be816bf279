"""What is added to the scores of a tile: forgetting between key and query, and a learned bias by distance.

Axes: b batch, h query heads, m queries and n keys of a tile, r features of a query, e distances.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.ops.attention.mask import AttentionMask, Tile


def decay_of(mask: AttentionMask, at: Tile, dtype: torch.dtype) -> Tensor | None:
    """(b h m n) ``q_decay - k_decay``, rounded to ``dtype`` once it is formed; None without."""
    if mask.q_decay is None or mask.k_decay is None:
        return None
    queries, keys = mask.q_decay[:, at.q0 : at.q1], mask.k_decay[:, at.k0 : at.k1]
    return (queries.transpose(1, 2)[..., None] - keys.transpose(1, 2)[..., None, :]).to(dtype)


class RelativeRows:
    """The learned biases of a tile's queries at every distance, and their gradients."""

    def __init__(self, mask: AttentionMask, at: Tile, dtype: torch.dtype) -> None:
        assert mask.rel_q is not None
        assert mask.rel_bank is not None
        self.mask = mask
        self.q, self.bank = mask.rel_q[:, at.q0 : at.q1].to(dtype), mask.rel_bank.to(dtype)
        self.by_distance = (self.q @ self.bank).transpose(1, 2)  # [b, h, m, e]
        self.grad: Tensor | None = None

    @classmethod
    def of_queries(cls, mask: AttentionMask, at: Tile, dtype: torch.dtype) -> RelativeRows | None:
        """None where the mask has no such bias."""
        return None if mask.rel_q is None else cls(mask, at, dtype)

    def bias(self, at: Tile) -> Tensor | None:
        """(b h m n); None where all keys of the tile are surely too far."""
        if self._far(at):
            return None
        index, outside = self._places(at)
        return self.by_distance.gather(-1, index).masked_fill(outside, 0.0)

    def add_gradient(self, at: Tile, of_scores: Tensor) -> None:
        """Take in the gradients (b h m n) of a tile's scores."""
        if self.grad is None:
            self.grad = torch.zeros_like(self.by_distance, memory_format=torch.contiguous_format)
        if not self._far(at):
            index, outside = self._places(at)
            self.grad.scatter_add_(-1, index, of_scores.masked_fill(outside, 0.0))

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Of these queries' ``rel_q`` (b m h r), and their part of that of ``rel_bank`` (r e)."""
        if self.grad is None:
            return torch.zeros_like(self.q), torch.zeros_like(self.bank)
        grad = self.grad.transpose(1, 2)
        return grad @ self.bank.mT, torch.einsum("bmhr,bmhe->re", self.q, grad)

    def _far(self, at: Tile) -> bool:
        # Given positions are not read: that would wait for the device.
        return self.mask.q_pos is None and at.s - at.t + at.q0 - at.k1 + 1 >= self.bank.shape[1]

    def _places(self, at: Tile) -> tuple[Tensor, Tensor]:
        rows, cols = at.positions(self.mask)
        ahead = rows - cols
        last = self.bank.shape[1] - 1
        outside = ((ahead < 0) | (ahead > last))[:, None]
        return ahead.clamp(0, last)[:, None].expand(*self.by_distance.shape[:2], -1, -1), outside
