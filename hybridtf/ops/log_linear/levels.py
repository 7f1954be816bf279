"""Levels of a Fenwick tree: how far back a token is, in blocks whose sizes are powers of two.

Token i (counted from its document's start) puts itself on level 0. What came before it falls into one block for each bit that
is set in i: level l holds the 2^(l-1) tokens that end where the bits of i below l - 1 are cleared. Token j is then on level
bit_length(i xor j): the highest bit in which the two differ. Beyond the last level nothing is split any more: it holds all
that is older.
"""

from __future__ import annotations

import torch
from torch import Tensor


def level(i: Tensor, j: Tensor, n_levels: int) -> Tensor:
    """bit_length(i xor j), at most ``n_levels - 1``: the level on which a token of index j is for one of index i."""
    # The exponent of a float is its bit length; those that float32 rounds are far beyond any last level.
    bits = torch.frexp((i ^ j).to(torch.float32)).exponent
    return bits.clamp(max=n_levels - 1).to(torch.int64)


def levels_after(before: Tensor, now: Tensor, n_levels: int) -> Tensor:
    """(... n_levels-1): what the levels 1, 2, ... of a document of ``before`` (...) tokens are when it has ``now`` (...)."""
    held = torch.arange(1, n_levels, device=now.device)
    return torch.maximum(held, level(before, now, n_levels)[..., None])


def counted_on(levels: Tensor, count: Tensor) -> Tensor:
    """All levels (b l h n p), as they are at a token, to those from 1 on, as they are after it: ``count`` (b) tokens with it.

    They are the bits of a counter: those that fall to 0 give their blocks to the one that rises to 1.
    """
    rising = level(count - 1, count, levels.shape[1])[:, None]
    index = torch.arange(levels.shape[1], device=levels.device)
    below, rises = (mask[..., None, None, None] for mask in (index < rising, index == rising))
    total = levels.masked_fill(~(below | rises), 0).sum(1, keepdim=True)
    return torch.where(rises, total, levels.masked_fill(below, 0))[:, 1:]
