"""FlashAttention (https://arxiv.org/abs/2205.14135, https://arxiv.org/abs/2307.08691) to be read: tiles, an online softmax,
weights that are made again in the backward. The formulas stand in the README beside this file.

It is kept as a lesson and as a test of the algorithm. ``blockwise.py`` is the form to use: it skips tiles that nobody sees, is
one call to a compiler, and knows every option.

Axes: b batch, h heads, t queries, s keys, k key dim, v value dim; m queries and n keys of a tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridtf.core.errors import KernelError
from hybridtf.core.kernels import KernelRequest
from hybridtf.ops.attention.mask import AttentionMask, Tile, accumulate_dtype, check_inputs
from hybridtf.ops.attention.sdpa import refusal
from hybridtf.ops.autocast import no_autocast

_TILE = 64


def why_not_tiled(request: KernelRequest) -> str | None:
    """What the lesson leaves out."""
    missing = sorted(request.features & {"softcap", "slopes", "sinks", "dropout", "decay", "relative"})
    return f"it is a lesson without {', '.join(missing)}" if missing else None


def attention_tiled(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, scale: float | None = None, dropout_p: float = 0.0,
    tile: int = _TILE,
) -> Tensor:
    """The same function as :func:`attention_reference`, for masks without softcap, slopes, sinks, decay and relative bias, and
    without dropout (else :class:`KernelError`). ``tile``: queries, and keys, of one tile.
    There is no gradient of the gradient."""
    check_inputs(q, k, v, mask, dropout_p)
    refused = "dropout" if dropout_p > 0 else refusal(mask)
    if refused is not None:
        raise KernelError(f"attention: the tiled lesson has no {refused}")
    with no_autocast(q.device):
        heads = [x.to(accumulate_dtype(q.dtype)).transpose(1, 2) for x in (q, k, v)]
        repeats = q.shape[2] // k.shape[2]
        heads[1:] = [x.repeat_interleave(repeats, 1) for x in heads[1:]]
        apply: Any = _Tiled.apply
        out: Tensor = apply(*heads, mask, q.shape[3] ** -0.5 if scale is None else scale, tile)
        return out.transpose(1, 2).to(q.dtype)


def _tiles(length: int, tile: int) -> list[tuple[int, int]]:
    return [(start, min(start + tile, length)) for start in range(0, length, tile)]


def _scores(q: Tensor, k: Tensor, mask: AttentionMask, scale: float, rows: tuple[int, int], keys: tuple[int, int]) -> Tensor:
    """(b h m n) of one tile, -inf where a query does not see a key."""
    raw = scale * q[:, :, slice(*rows)] @ k[:, :, slice(*keys)].transpose(2, 3)
    seen = Tile(q.shape[2], k.shape[2], *rows, *keys, q.device).visible(mask)
    return raw if seen is None else raw.masked_fill(~seen[:, None], -torch.inf)


class _Tiled(torch.autograd.Function):
    """q (b h t k), k (b h s k), v (b h s v) to (b h t v)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, tile: int) -> Tensor:
        y = q.new_zeros(*q.shape[:3], v.shape[3])
        log_sum = q.new_full(q.shape[:3], -torch.inf)
        for rows in _tiles(q.shape[2], tile):
            # Over the keys so far: the largest score, the sum of weights, and the sum of weighted values, both over exp(most).
            most = log_sum[:, :, slice(*rows)].clone()
            total, values = torch.zeros_like(most), torch.zeros_like(y[:, :, slice(*rows)])
            for keys in _tiles(k.shape[2], tile):
                x = _scores(q, k, mask, scale, rows, keys)
                new = torch.maximum(most, x.amax(-1))
                shift = new.masked_fill(new == -torch.inf, 0)  # nothing seen yet: no -inf minus -inf
                fade, weights = torch.exp(most - shift), torch.exp(x - shift[..., None])
                total = total * fade + weights.sum(-1)
                values = values * fade[..., None] + weights @ v[:, :, slice(*keys)]
                most = new
            some = total > 0
            y[:, :, slice(*rows)] = torch.where(some[..., None], values / torch.where(some, total, 1)[..., None], 0)
            log_sum[:, :, slice(*rows)] = torch.where(some, most + total.log(), 0)
        ctx.save_for_backward(q, k, v, y, log_sum)
        ctx.mask, ctx.scale, ctx.tile = mask, scale, tile
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, log_sum = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        mean = (dy * y).sum(-1)  # sum over keys of weight times its gradient
        for rows in _tiles(q.shape[2], ctx.tile):
            for keys in _tiles(k.shape[2], ctx.tile):
                x = _scores(q, k, ctx.mask, ctx.scale, rows, keys)
                weights = torch.exp(x - log_sum[:, :, slice(*rows), None])
                upper = dy[:, :, slice(*rows)]
                dv[:, :, slice(*keys)] += weights.transpose(2, 3) @ upper
                dx = weights * (upper @ v[:, :, slice(*keys)].transpose(2, 3) - mean[:, :, slice(*rows), None])
                dq[:, :, slice(*rows)] += ctx.scale * dx @ k[:, :, slice(*keys)]
                dk[:, :, slice(*keys)] += ctx.scale * dx.transpose(2, 3) @ q[:, :, slice(*rows)]
        return dq, dk, dv, None, None, None
