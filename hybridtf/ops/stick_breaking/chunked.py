"""Stick-breaking attention by chunks of queries: memory linear in length.

What is left of a stick is a running sum of logarithms, from the nearest key backwards, over the query's whole row of scores.

Axes: b batch, m queries, s keys, g key heads, r query heads per key head, h = g r heads, k key dim, v value dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.ops.attention.mask import AttentionMask, Tile, accumulate_dtype
from hybridtf.ops.attention.query_chunks import by_query_chunks
from hybridtf.ops.exponential import exp
from hybridtf.ops.stick_breaking.reference import check_stick, sees


def stick_breaking_chunked(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, scale: float | None = None, attend_current: bool = False,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same function as :func:`stick_breaking_reference`. ``chunk_size``: queries of a chunk; None: by the shapes."""
    check_stick(q, k, v, mask)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    y, left = by_query_chunks(_break, q, k, v, mask, chunk_size, scale, attend_current)
    return y, left


def _break(
    q: Tensor, k: Tensor, v: Tensor, tile: Tile, mask: AttentionMask, scale: float, attend_current: bool
) -> tuple[Tensor, Tensor]:
    """One chunk."""
    dtype = accumulate_dtype(q.dtype)
    heads = (q.to(dtype) * scale).unflatten(2, (k.shape[2], -1))
    hidden = ~sees(tile, mask, attend_current)[:, None, None]
    # Scores of hidden keys may be anything, and infinity times 0 would reach the gradients.
    z = torch.einsum("bmgrk,bsgk->bgrms", heads, k.to(dtype)).masked_fill(hidden, 0.0)
    kept = F.logsigmoid(-z).masked_fill(hidden, 0.0)
    # Up to the next key, and not the difference of two running sums: that would lose the small one of the near keys.
    after = F.pad(kept[..., 1:], (0, min(1, kept.shape[-1]))).flip(-1).cumsum(-1).flip(-1)
    weights = exp(F.logsigmoid(z) + after).masked_fill(hidden, 0.0)
    y = torch.einsum("bgrms,bsgv->bmgrv", weights, v.to(dtype)).flatten(2, 3)
    return y.to(q.dtype), kept.sum(-1).exp().permute(0, 3, 1, 2).flatten(2)
