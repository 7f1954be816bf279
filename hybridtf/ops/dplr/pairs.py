"""Products between the tokens of a chunk with decays by channel between them, by halving, and their gradients by hand.
README.md has the derivation.

Axes: g chunks, and all that lies beside them; x rows that read, y rows that write, of each token; l places of a chunk, a power
of 2; k key width, d width of the decay (k or 1); s places of a block, m blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Halved(NamedTuple):
    """``products`` (g x y l l): what a token (rows) reads of an earlier one (columns), with the decays of the tokens between;
    on the diagonal what was given, above it 0.

    The rest are products of decays inside a chunk, so that none is a quotient. ``earlier`` (g l d): from the chunk's start to
    before a token. ``later`` (g l d): after a token to the chunk's end. ``total`` (g 1 d): all.
    """

    products: Tensor
    earlier: Tensor
    later: Tensor
    total: Tensor


def halved(reads: Tensor, writes: Tensor, decay: Tensor, own: Tensor, apart: Tensor | None = None) -> Halved:
    """``reads`` (g x l k), ``writes`` (g y l k), ``decay`` (g l d), ``own`` (g x y l); ``apart`` (g l l) bool: pairs that are
    nothing to each other. A token's own decay is not between it and an earlier one: who reads after it multiplies ``reads``."""
    apply: Any = _Halved.apply
    return Halved(*apply(reads, writes, decay, own, apart))


class _Level(NamedTuple):
    """What joining blocks of s tokens in pairs keeps for its gradients: both halves of each pair, (g m/2 s d) and (g m/2 1 d),
    and the factors of the products between them, (g m/2 x s k)."""

    earlier: tuple[Tensor, Tensor]
    later: tuple[Tensor, Tensor]
    total: tuple[Tensor, Tensor]
    reads: Tensor
    writes: Tensor


class _Halved(torch.autograd.Function):
    """Autograd's own way back through the halves takes 1.3 times as long: it fills with zeros what each piece leaves out."""

    @staticmethod
    def forward(
        ctx: Any, reads: Tensor, writes: Tensor, decay: Tensor, own: Tensor, apart: Tensor | None
    ) -> tuple[Tensor, ...]:
        length = reads.shape[2]
        products = reads.new_zeros(*own.shape, length)
        earlier, later, total = torch.ones_like(decay), torch.ones_like(decay), decay
        levels = []
        size = 1
        while size < length:
            early, late = _halves(earlier, size), _halves(later, size)
            level = _Level(
                early, late, _halves(total, 1), _scaled(reads, early[1], size, 1), _scaled(writes, late[0], size, 0)
            )
            _across(products, size).copy_(_product(level.reads, level.writes))
            earlier, later, total = _longer(level)
            levels.append(level)
            size *= 2
        products.diagonal(dim1=-2, dim2=-1).copy_(own)
        ctx.levels = levels
        ctx.save_for_backward(reads, writes, apart)
        if apart is not None:
            products.masked_fill_(apart[:, None, None], 0)
        return products, earlier, later, total

    @staticmethod
    def backward(
        ctx: Any, dproducts: Tensor, dearlier: Tensor, dlater: Tensor, dtotal: Tensor
    ) -> tuple[Tensor | None, ...]:
        reads, writes, apart = ctx.saved_tensors
        if apart is not None:
            dproducts = dproducts.masked_fill(apart[:, None, None], 0)
        dreads, dwrites = torch.zeros_like(reads), torch.zeros_like(writes)
        size = reads.shape[2]
        for level in reversed(ctx.levels):
            size //= 2
            dearlier, dlater, dtotal = _longer_backward(level, dearlier, dlater, dtotal)
            across = _across(dproducts, size)
            flat = across.reshape(-1, across.shape[2] * size, across.shape[4] * size)
            scaled_reads = flat @ level.writes.flatten(2, 3).flatten(0, 1)
            scaled_writes = flat.mT @ level.reads.flatten(2, 3).flatten(0, 1)
            _scaled_backward(scaled_reads, reads, dreads, level.earlier[1], dearlier, size, 1)
            _scaled_backward(scaled_writes, writes, dwrites, level.later[0], dlater, size, 0)
        return dreads, dwrites, dtotal, dproducts.diagonal(dim1=-2, dim2=-1), None


def _halves(z: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(g l d) in blocks of 2 size: their first and second halves, (g m/2 size d)."""
    first, second = z.unflatten(1, (-1, 2, size)).unbind(2)
    return first, second


def _half(z: Tensor, size: int, which: int) -> Tensor:
    """(g x l k) in blocks of 2 size: a view of one half of each, (g m/2 x size k)."""
    half: Tensor = z.unflatten(2, (-1, 2, size))[:, :, :, which].transpose(1, 2)
    return half


def _scaled(z: Tensor, factor: Tensor, size: int, which: int) -> Tensor:
    """One half of each block times ``factor`` (g m/2 size d), in the order of the products."""
    half = _half(z, size, which)
    return torch.mul(half, factor[:, :, None], out=z.new_empty(half.shape))


def _product(reads: Tensor, writes: Tensor) -> Tensor:
    """(g m/2 x s y s)."""
    flat = reads.flatten(2, 3).flatten(0, 1) @ writes.flatten(2, 3).flatten(0, 1).mT
    return flat.view(*reads.shape[:4], *writes.shape[2:4])


def _across(z: Tensor, size: int) -> Tensor:
    """A view of (g x y l l): of each pair of blocks, rows of the second and columns of the first, (g m/2 x s y s)."""
    blocks = z.unflatten(4, (-1, 2, size)).unflatten(3, (-1, 2, size))[:, :, :, :, 1, :, :, 0]
    view: Tensor = blocks.diagonal(dim1=3, dim2=5).permute(0, 5, 1, 3, 2, 4)
    return view


def _longer(level: _Level) -> tuple[Tensor, Tensor, Tensor]:
    """The products of decays over blocks of twice the size."""
    (early_1, early_2), (late_1, late_2), (first, second) = level.earlier, level.later, level.total
    earlier = torch.cat([early_1, early_2 * first], 2).flatten(1, 2)
    later = torch.cat([late_1 * second, late_2], 2).flatten(1, 2)
    return earlier, later, (first * second).squeeze(2)


def _longer_backward(level: _Level, dearlier: Tensor, dlater: Tensor, dtotal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    early, late, (first, second) = level.earlier[1], level.later[0], level.total
    size = early.shape[2]
    (dearly_1, dearly_2), (dlate_1, dlate_2) = _halves(dearlier, size), _halves(dlater, size)
    dtotal = dtotal[:, :, None]
    dfirst = (dearly_2 * early).sum(2, keepdim=True) + dtotal * second
    dsecond = (dlate_1 * late).sum(2, keepdim=True) + dtotal * first
    dearlier = torch.cat([dearly_1, dearly_2 * first], 2).flatten(1, 2)
    dlater = torch.cat([dlate_1 * second, dlate_2], 2).flatten(1, 2)
    return dearlier, dlater, torch.cat([dfirst, dsecond], 2).flatten(1, 2)


def _scaled_backward(
    dscaled: Tensor, z: Tensor, dz: Tensor, factor: Tensor, dfactor: Tensor, size: int, which: int
) -> None:
    """Add to the gradients of what :func:`_scaled` was given."""
    half, dhalf = _half(z, size, which), _half(dz, size, which)
    dscaled = dscaled.view(half.shape)
    dhalf.addcmul_(dscaled, factor[:, :, None])
    of_factor = dscaled.mul_(half).sum(2)
    shared = factor.shape[-1] == 1 != half.shape[-1]
    _halves(dfactor, size)[which].add_(of_factor.sum(-1, keepdim=True) if shared else of_factor)
