"""Attention of few queries, all scores at once: a step of decoding under a mask that no backend of torch has.

Blocks would be walked for a handful of scores there. Axes: b batch, t queries, s keys, h query heads, g key heads, k key dim, v
value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.ops.attention.bias import RelativeRows, decay_of
from hybridtf.ops.attention.mask import AttentionMask, accumulate_dtype, check_inputs, whole
from hybridtf.ops.attention.sdpa import simple_mask
from hybridtf.ops.autocast import no_autocast


def attention_few(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, scale: float | None = None, dropout_p: float = 0.0
) -> Tensor:
    """The same function as :func:`attention_reference`; heads that share keys read them once. Memory grows with t * s."""
    check_inputs(q, k, v, mask, dropout_p)
    (b, t, h, width), g = q.shape, k.shape[2]
    dtype = accumulate_dtype(q.dtype)
    with no_autocast(q.device):
        queries = q.to(dtype) * (width**-0.5 if scale is None else scale)
        rows = queries.transpose(1, 2).reshape(b, g, h // g * t, width)
        scores = (rows @ k.to(dtype).permute(0, 2, 3, 1)).view(b, h, t, -1)
        weights = _weights(_biased(scores, q, k, mask), _visible(q, k, mask), mask.sinks)
        weights = torch.nn.functional.dropout(weights, dropout_p) if dropout_p else weights
        y = weights.view(b, g, h // g * t, -1) @ v.to(dtype).transpose(1, 2)
        return y.view(b, h, t, v.shape[3]).transpose(1, 2).to(q.dtype)


def _biased(scores: Tensor, q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor:
    """Scores (b h t s) with all that is done to them before the softmax."""
    if mask.softcap is not None:
        scores = mask.softcap * torch.tanh(scores / mask.softcap)
    if mask.slopes is not None:
        scores = scores - mask.slopes.to(scores.dtype)[:, None, None] * whole(q, k).distance(mask)[:, None]
    relative = RelativeRows.of_queries(mask, whole(q, k), scores.dtype)
    for added in (decay_of(mask, whole(q, k), scores.dtype), None if relative is None else relative.bias(whole(q, k))):
        scores = scores if added is None else scores + added
    return scores


def _visible(q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor | None:
    """(b t s), or None where every query sees every key, as the last token of a document does."""
    simple = simple_mask(q, k, mask)
    return None if simple is not None and not simple["is_causal"] else whole(q, k).visible(mask)


def _weights(scores: Tensor, seen: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Softmax over the keys that are seen, and over the sink, which carries no value; all zero where nothing is seen."""
    b, h, t, s = scores.shape
    alone = None
    if seen is not None:
        alone = ~seen.any(-1, keepdim=True)[:, None]
        # A row of -inf alone would be 0/0: it keeps its scores here and loses its weights below.
        scores = scores.masked_fill(~(seen[:, None] | alone), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(b, t, h).mT[..., None]], dim=-1)
    weights = scores.softmax(-1)
    weights = weights[..., :s] if sinks is not None else weights
    return weights if alone is None else weights.masked_fill(alone, 0.0)
