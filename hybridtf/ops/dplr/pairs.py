"""Products with decays between the tokens of a chunk, by halving, and their gradients by hand. README.md has the derivation.

Axes: g = n b h (chunks, batch, heads), l places of a chunk, k key width, d width of the decay (k or 1), s places of a block,
m blocks of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Pairs(NamedTuple):
    """Rows read and columns write, decays between them included. ``ru``, ``rk`` (g l l): of earlier tokens alone. ``qu`` and
    ``qk`` (g l l): of earlier tokens and of the token's own, which has not decayed.

    The rest are products of decays inside a chunk, so that none is a quotient. ``earlier`` (g l d): from the chunk's start to
    before a token. ``later`` (g l d): after a token to the chunk's end. ``total`` (g 1 d): all.
    """

    ru: Tensor
    rk: Tensor
    qu: Tensor
    qk: Tensor
    earlier: Tensor
    later: Tensor
    total: Tensor


def pairs(r: Tensor, q: Tensor, u: Tensor, k: Tensor, decay: Tensor, ids: Tensor | None) -> Pairs:
    """``r``, ``q``, ``u``, ``k`` (g l k), ``decay`` (g l d), ``ids`` (g l) of documents or None; l a power of 2."""
    apply: Any = _Pairs.apply
    return Pairs(*apply(r, q, u, k, decay, ids))


class _Level(NamedTuple):
    """What joining blocks of s tokens in pairs keeps for its gradients: (g m s d) and (g m 1 d), both halves of each pair, and
    the factors of the products between them, (g m/2 2s k)."""

    earlier: tuple[Tensor, Tensor]
    later: tuple[Tensor, Tensor]
    total: tuple[Tensor, Tensor]
    reads: Tensor
    writes: Tensor
    apart: Tensor | None


class _Pairs(torch.autograd.Function):
    """Autograd's own way back through the halves takes three times as long: it fills with zeros what each piece leaves out."""

    @staticmethod
    def forward(ctx: Any, r: Tensor, q: Tensor, u: Tensor, k: Tensor, decay: Tensor, ids: Tensor | None) -> tuple[Tensor, ...]:
        g, length, _ = r.shape
        decayed = q * decay
        found = r.new_zeros(2, 2, g, length, length)
        earlier, later, total = torch.ones_like(decay), torch.ones_like(decay), decay
        levels = []
        size = 1
        while size < length:
            level = _level(r, decayed, u, k, earlier, later, total, ids, size)
            product = level.reads @ level.writes.mT
            if level.apart is not None:
                product.view(-1, 2, size, 2, size).masked_fill_(level.apart, 0)
            _across(found, size).copy_(product.view(g, -1, 2, size, 2, size))
            earlier, later, total = _longer(level)
            levels.append(level)
            size *= 2
        for of_queries, written in zip(found[1], (u, k), strict=True):
            of_queries.diagonal(dim1=-2, dim2=-1).copy_((q * written).sum(-1))
        ctx.levels = levels
        ctx.save_for_backward(r, q, u, k, decay, decayed)
        return (*found.flatten(0, 1).unbind(0), earlier, later, total)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        r, q, u, k, decay, decayed = ctx.saved_tensors
        dpairs = torch.stack(grads[:4]).unflatten(0, (2, 2))
        dearlier, dlater, dtotal = grads[4:]
        own_u, own_k = (x.diagonal(dim1=-2, dim2=-1)[..., None] for x in dpairs[1])
        dq = own_u * u + own_k * k
        du, dk, dr, ddecayed = own_u * q, own_k * q, torch.zeros_like(r), torch.zeros_like(q)
        size = r.shape[1]
        for level in reversed(ctx.levels):
            size //= 2
            dearlier, dlater, dtotal = _longer_backward(level, dearlier, dlater, dtotal)
            dproduct = _across(dpairs, size).reshape(-1, 2 * size, 2 * size)
            if level.apart is not None:
                dproduct = dproduct.view(-1, 2, size, 2, size).masked_fill(level.apart, 0).view(dproduct.shape)
            dreads, dwrites = dproduct @ level.writes, dproduct.mT @ level.reads
            _scaled_backward(dreads, (r, decayed), (dr, ddecayed), level.earlier[1], dearlier, size, 1)
            _scaled_backward(dwrites, (u, k), (du, dk), level.later[0], dlater, size, 0)
        dq += ddecayed * decay
        return dr, dq, du, dk, dtotal + _to_width(ddecayed * q, decay), None


def _level(
    r: Tensor, q: Tensor, u: Tensor, k: Tensor, earlier: Tensor, later: Tensor, total: Tensor, ids: Tensor | None, size: int,
) -> _Level:
    early, late = _halves(earlier, size), _halves(later, size)
    reads = torch.cat([_halves(x, size)[1] * early[1] for x in (r, q)], 2).flatten(0, 1)
    writes = torch.cat([_halves(x, size)[0] * late[0] for x in (u, k)], 2).flatten(0, 1)
    apart = None
    if ids is not None:
        first, second = (half.reshape(-1, size) for half in _halves(ids, size))
        apart = (second[:, :, None] != first[:, None, :])[:, None, :, None, :]
    return _Level(early, late, _halves(total, 1), reads, writes, apart)


def _halves(z: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(g l ...) in blocks of 2 size: their first and second halves, (g l/(2 size) size ...)."""
    first, second = z.unflatten(1, (-1, 2, size)).unbind(2)
    return first, second


def _across(x: Tensor, size: int) -> Tensor:
    """A view of (2 2 g l l): of each pair of blocks, rows of the second and columns of the first, (g m/2 2 s 2 s)."""
    blocks = x.unflatten(4, (-1, 2, size)).unflatten(3, (-1, 2, size))[:, :, :, :, 1, :, :, 0]
    view: Tensor = blocks.diagonal(dim1=3, dim2=5).permute(2, 5, 0, 3, 1, 4)
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
    dscaled: Tensor, given: tuple[Tensor, Tensor], dgiven: tuple[Tensor, Tensor], factor: Tensor, dfactor: Tensor, size: int,
    half: int,
) -> None:
    """Of both of ``given`` times ``factor`` in one half of each block, ``dscaled`` (g m/2, 2s, k): added to the gradients."""
    parts = dscaled.unflatten(1, (2, size)).unflatten(0, factor.shape[:2]).unbind(2)
    into = _halves(dfactor, size)[half]
    for part, x, dx in zip(parts, given, dgiven, strict=True):
        _halves(dx, size)[half].addcmul_(part, factor)
        into += _to_width(part * _halves(x, size)[half], factor)


def _to_width(x: Tensor, like: Tensor) -> Tensor:
    """Summed over channels where they share a factor."""
    return x.sum(-1, keepdim=True) if like.shape[-1] == 1 != x.shape[-1] else x
