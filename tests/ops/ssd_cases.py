"""Inputs, random documents and comparisons for the tests of ``ssd``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtf.core.segments import Segments


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    log_a: Tensor
    initial_state: Tensor


def inputs(
    seed: int, b: int, t: int, g: int = 1, h: int = 2, n: int = 5, p: int = 3, *, dtype: torch.dtype = torch.float64,
    decay: float = 1.5,
) -> Inputs:
    gen = torch.Generator().manual_seed(seed)
    shapes = ((b, t, g, n), (b, t, g, n), (b, t, h, p), (b, t, h), (b, h, n, p))
    x = [torch.randn(s, generator=gen, dtype=torch.float64) for s in shapes]
    x[3] = -x[3].abs() * decay
    return Inputs(*(y.to(dtype).requires_grad_() for y in x))


def random_segments(seed: int, b: int, t: int) -> Segments:
    """Rows of documents cut anywhere, pads anywhere (left, middle, right, none, all), every other row continuing."""
    gen = torch.Generator().manual_seed(seed)
    starts = torch.rand(b, t, generator=gen) < 0.08
    ids = 3 + 2 * starts.to(torch.int64).cumsum(1)
    rate = torch.tensor([0.0, 0.1, 0.5, 1.0])[torch.randint(4, (b, 1), generator=gen)]
    pads = torch.rand(b, t, generator=gen) < rate
    if t > 4:
        left, right = (torch.randint(-t // 3, t // 3, (b, 1), generator=gen) for _ in range(2))
        place = torch.arange(t)
        pads |= (place < left) | (place >= t - right)
    return Segments.from_ids(ids.masked_fill(pads, 0), continues=(torch.arange(b) + seed) % 2 == 0)
