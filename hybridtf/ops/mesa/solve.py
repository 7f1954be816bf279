"""Conjugate gradients for many symmetric, positive systems at once, in a number of steps that no data decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Product: TypeAlias = Callable[[Tensor], Tensor]


def conjugate_gradients(product: Product, right: Tensor, n_steps: int) -> Tensor:
    """x (... k) with product(x) = right, without gradients: exact after k steps but for rounding, and close well before
    where few directions matter (https://doi.org/10.6028/jres.049.044)."""
    smallest = torch.finfo(right.dtype).tiny
    with torch.no_grad():
        x, rest, direction = torch.zeros_like(right), right, right
        size = rest.square().sum(-1, keepdim=True)
        for _ in range(n_steps):
            image = product(direction)
            # Once nothing is left, size is 0, and x stays.
            length = size / (direction * image).sum(-1, keepdim=True).clamp(min=smallest)
            x = torch.addcmul(x, length, direction)
            rest = torch.addcmul(rest, length, image, value=-1)
            before, size = size, rest.square().sum(-1, keepdim=True)
            direction = torch.addcmul(rest, size / before.clamp(min=smallest), direction)
    return x


def solve(product: Product, right: Tensor, n_steps: int) -> Tensor:
    """:func:`conjugate_gradients` with the gradients of the solution in whatever ``product`` and ``right`` depend on.

    They are those of x = A^-1 right: one more solve, and one more product, whatever the number of steps was.
    """
    x = conjugate_gradients(product, right, n_steps)
    if not torch.is_grad_enabled():
        return x
    apply: Any = _Implicit.apply
    solved: Tensor = apply(right - product(x), x, product, n_steps)
    return solved


class _Implicit(torch.autograd.Function):
    """x, as a function of what is left of its equation: dx = A^-1 d(right - A x)."""

    @staticmethod
    def forward(ctx: Any, rest: Tensor, x: Tensor, product: Product, n_steps: int) -> Tensor:
        ctx.product, ctx.n_steps = product, n_steps
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return conjugate_gradients(ctx.product, grad, ctx.n_steps), None, None, None
