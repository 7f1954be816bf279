"""Talking-heads attention by chunks of queries: memory linear in length.

A head's weights need the finished softmax of all heads, so that no online softmax helps. A chunk of queries sees whole rows of
scores instead, and its scores are computed again for the gradients.

Axes: b batch, t queries, s keys, g key heads, r query heads per key head, h = g r heads, k key dim, v value dim.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hybridtf.ops.attention.mask import AttentionMask, Tile, accumulate_dtype, no_autocast, whole
from hybridtf.ops.talking_attention.reference import check_talking

# Scores of a chunk (b h queries s): what was fastest on a CPU, and enough to fill a GPU (a guess).
_SCORES_CPU = 2**19
_SCORES_GPU = 2**26
# Fewer queries at once than this would make many calls of a long row.
_FEWEST = 32


def talking_attention_chunked(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, score_mix: Tensor | None, weight_mix: Tensor | None, *,
    scale: float | None = None, chunk_size: int | None = None,
) -> Tensor:
    """The same function as :func:`talking_attention_reference`. ``chunk_size``: queries of a chunk; None: by the shapes."""
    check_talking(q, k, v, mask, score_mix, weight_mix)
    t = q.shape[1]
    size = _size_of(q, k) if chunk_size is None else chunk_size
    scale = q.shape[3] ** -0.5 if scale is None else scale
    with no_autocast(q.device):
        if t <= size:
            return _talk(q, k, v, score_mix, weight_mix, whole(q, k), mask, scale)
        parts = []
        for start in range(0, t, size):
            stop = min(start + size, t)
            tile, keys = _tile(q, k, mask, start, stop)
            given = (q[:, start:stop], k[:, :keys], v[:, :keys], score_mix, weight_mix, tile, mask, scale)
            # Nothing is drawn at random inside: no state of a generator to keep.
            part: Tensor = checkpoint(_talk, *given, use_reentrant=False, preserve_rng_state=False)
            parts.append(part)
        return torch.cat(parts, dim=1)


def _size_of(q: Tensor, k: Tensor) -> int:
    budget = _SCORES_CPU if q.device.type == "cpu" else _SCORES_GPU
    size: int = torch.sym_max(_FEWEST, budget // torch.sym_max(1, q.shape[0] * q.shape[2] * k.shape[1]))
    return size


def _tile(q: Tensor, k: Tensor, mask: AttentionMask, start: int, stop: int) -> tuple[Tile, int]:
    """The rectangle of a chunk of queries, and how many keys it has to look at."""
    tile = whole(q, k)
    # Without positions the queries are the last of the keys: later keys are surely hidden, unless a prefix shows them.
    later = mask.causal and mask.q_pos is None and mask.prefix_len is None
    keys = max(tile.s - tile.t + stop, 0) if later else tile.s
    return replace(tile, q0=start, q1=stop, k1=keys), keys


def _talk(
    q: Tensor, k: Tensor, v: Tensor, score_mix: Tensor | None, weight_mix: Tensor | None, tile: Tile, mask: AttentionMask,
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
