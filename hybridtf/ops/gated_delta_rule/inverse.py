"""The inverse of I + A for a strictly lower A, by matrix products alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def padded_rows(rows: int) -> int:
    """``rows`` rounded up to a power of two: what halving needs."""
    return 1 << max(rows - 1, 0).bit_length()


def block_pairs(x: Tensor, size: int) -> Tensor:
    """Of x (... l l): for each pair of neighbouring blocks of ``size``, what lies right of the first and below it:
    rows of the second, columns of the first, (... l/(2 size) size size).
    """
    pairs = x.shape[-1] // (2 * size)
    blocks = x.unflatten(-2, (pairs, 2, size)).unflatten(-1, (pairs, 2, size))
    return torch.diagonal(blocks[..., :, 1, :, :, 0, :], dim1=-4, dim2=-2).movedim(-1, -3)


def joined(first: Tensor, cross: Tensor, second: Tensor) -> Tensor:
    """Block triangular matrices (... 2s 2s) out of their diagonal blocks and what is below (... s s)."""
    return torch.cat([torch.cat([first, torch.zeros_like(cross)], -1), torch.cat([cross, second], -1)], -2)


class _Inverse(torch.autograd.Function):
    """d(I + A)^-1 = -T dA T, two products instead of a walk back through the halves."""

    @staticmethod
    def forward(a: Tensor) -> Tensor:
        rows = a.shape[-1]
        spare = padded_rows(rows) - rows
        a = F.pad(a, (0, spare, 0, spare)) if spare else a
        t = a.new_ones(*a.shape[:-1], 1, 1)
        for level in range(a.shape[-1].bit_length() - 1):
            first, second = t.unflatten(-3, (-1, 2)).unbind(-3)
            t = joined(first, -(second @ (block_pairs(a, 2**level) @ first)), second)
        found: Tensor = t.squeeze(-3)[..., :rows, :rows]
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, dt: Tensor) -> Tensor:
        (t,) = ctx.saved_tensors
        da: Tensor = (t.mT @ (dt @ t.mT)).mul_(dt.new_full(dt.shape[-2:], -1.0).tril(-1))
        return da


def unit_inverse(a: Tensor) -> Tensor:
    """(I + a)^-1 for a (... l l), zero on and above its diagonal. Neighbouring blocks are joined, from size 1 up:

        [[I + A1, 0], [X, I + A2]]^-1 = [[T1, 0], [-T2 X T1, T2]]
    """
    apply: Any = _Inverse.apply
    t: Tensor = apply(a)
    return t
