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


def loss(y: Tensor, state: Tensor, seed: int = 0) -> Tensor:
    """A weighted sum of both results; the weights do not depend on how they lie in memory."""
    gen = torch.Generator().manual_seed(seed)
    parts = [(z.double() * torch.randn(z.shape, generator=gen, dtype=torch.float64)).sum() for z in (y, state)]
    return parts[0] + parts[1]


def grads(y: Tensor, state: Tensor, x: Inputs, seed: int = 0) -> tuple[Tensor, ...]:
    found = torch.autograd.grad(loss(y, state, seed), x, allow_unused=True)
    return tuple(torch.zeros_like(a) if f is None else f for a, f in zip(x, found, strict=True))


def call(op, x: Inputs, **more):
    return op(*x[:6], initial_state=x.initial_state, **more)


def assert_same(x: Inputs, first, second, tol: float = 1e-10) -> None:
    for a, b in zip([*first, *grads(*first, x)], [*second, *grads(*second, x)], strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)
