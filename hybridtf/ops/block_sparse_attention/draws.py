"""Blocks drawn at random for each block of queries, by a seed alone: the same in any call, for any cut.

Axes: the shape of ``block``, and n draws.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _mixed(x: Tensor) -> Tensor:
    """The numbers of ``x`` (int64) well scattered over 0 .. 2**31 - 1."""
    for factor in (0x45D9F3B, 0x119DE1F3):
        x = ((x ^ (x >> 16)) * factor) & 0xFFFFFFFF
    return (x ^ (x >> 16)) & 0x7FFFFFFF


def random_blocks(block: Tensor, free: tuple[tuple[Tensor, Tensor], ...], n: int, seed: int, chooser: Tensor) -> Tensor:
    """``n`` different blocks for each of ``block`` (any shape, int64), each as likely as another; -1 where there are fewer.

    ``free``: ranges (begin, end) of the blocks to draw from, which do not overlap; tensors of the shape of ``block``.
    ``chooser``: a number for who draws (a head), of that shape too. Returns (shape n).
    """
    sizes = [(end - begin).clamp(min=0) for begin, end in free]
    left = torch.stack(sizes).sum(0)
    drawn: list[Tensor] = []
    for i in range(n):
        number = _mixed(_mixed(_mixed(_mixed(block + seed * 1_000_003) + chooser) + left) + i)
        place = number % (left - i).clamp(min=1)
        # The place counts what was not drawn yet: step over the earlier draws, smallest first.
        for earlier in torch.stack(drawn, -1).sort(-1).values.unbind(-1) if drawn else ():
            place = place + (place >= earlier).to(place.dtype)
        drawn.append(place)
    found = []
    for i, place in enumerate(drawn):
        rest, at = place, torch.full_like(block, -1)
        for (begin, _), size in zip(free, sizes, strict=True):
            at = torch.where((rest >= 0) & (rest < size), begin + rest, at)
            rest = torch.where(rest >= 0, rest - size, rest)
        found.append(torch.where(left > i, at, -1))
    return torch.stack(found, -1) if found else block.new_zeros(*block.shape, 0)
