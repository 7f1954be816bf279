"""Talking-heads attention by chunks of queries: memory linear in length.

A head's weights need the finished softmax of all heads, so that no online softmax helps. A chunk of queries sees whole rows of
scores instead, and its scores are computed again for the gradients.

Axes: b batch, t queries, s keys, g key heads, r query heads per key head, h = g r heads, k key dim, v value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.ops.attention.mask import AttentionMask, Tile, accumulate_dtype
from hybridtf.ops.attention.query_chunks import by_query_chunks
from hybridtf.ops.talking_attention.reference import check_talking


def talking_attention_chunked(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, score_mix: Tensor | None, weight_mix: Tensor | None, *,
    scale: float | None = None, chunk_size: int | None = None,
) -> Tensor:
    """The same function as :func:`talking_attention_reference`. ``chunk_size``: queries of a chunk; None: by the shapes."""
    check_talking(q, k, v, mask, score_mix, weight_mix)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    out: Tensor = by_query_chunks(_talk, q, k, v, mask, chunk_size, score_mix, weight_mix, scale)
    return out


def _talk(
    q: Tensor, k: Tensor, v: Tensor, tile: Tile, mask: AttentionMask, score_mix: Tensor | None, weight_mix: Tensor | None,
    scale: float,
) -> Tensor:
    """One chunk."""
    dtype = accumulate_dtype(q.dtype)
    heads = (q.to(dtype) * scale).unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("btgrk,bsgk->bgrts", heads, k.to(dtype)).flatten(1, 2)
    if score_mix is not None:
        scores = torch.einsum("bits,ij->bjts", scores, score_mix.to(dtype))
    seen = tile.visible(mask)
    if seen is None:
        weights = scores.softmax(-1)
    else:
        alone = ~seen.any(-1, keepdim=True)[:, None]
        # A row that sees nothing is shown all keys, which is finite, and its weights are zeroed.
        weights = scores.masked_fill(~seen[:, None] & ~alone, -torch.inf).softmax(-1).masked_fill(alone, 0.0)
    if weight_mix is not None:
        weights = torch.einsum("bits,ij->bjts", weights, weight_mix.to(dtype))
    out = torch.einsum("bgrts,bsgv->btgrv", weights.unflatten(1, (k.shape[2], -1)), v.to(dtype))
    return out.flatten(2, 3).to(q.dtype)
