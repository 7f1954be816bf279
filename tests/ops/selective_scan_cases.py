"""Inputs and comparisons for the tests of ``selective_scan``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    initial_state: Tensor

    @property
    def in_time(self) -> list[int]:
        """Places of the arguments that have a time axis."""
        return [0, 1, 3, 4]

    def part(self, rows: slice, times) -> list[Tensor]:
        """The six arguments of the op, for some rows and some tokens."""
        return [z[rows, times] if i in self.in_time else z for i, z in enumerate(self[:6])]


def inputs(
    seed: int, b: int, t: int, c: int = 4, n: int = 3, g: int | None = None, *, dtype: torch.dtype = torch.float64,
    step: float = 1.0,
) -> Inputs:
    """``g`` None: B and C have no axis of groups."""
    gen = torch.Generator().manual_seed(seed)
    groups = () if g is None else (g,)
    shapes = ((b, t, c), (b, t, c), (c, n), (b, t, *groups, n), (b, t, *groups, n), (c,), (b, c, n))
    z = [torch.randn(s, generator=gen, dtype=torch.float64) for s in shapes]
    z[1], z[2] = z[1].abs() * step, -z[2].abs() - 0.05
    return Inputs(*(y.to(dtype).requires_grad_() for y in z))
