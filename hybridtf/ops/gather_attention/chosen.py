"""Attention to chosen tokens, and an indexer's scores of them, by gathering: time and memory grow with t * n.

Axes: b batch, t queries, s slots of keys, h query heads, g key heads, c choosers, n choices, m queries of a part, r heads that
share a key head, k key dim, v value dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.block_sparse_attention import Places
from hybridtf.ops.gather_attention.gathered import gather_op
from hybridtf.ops.gather_attention.shapes import check_call, outside_of, placed, slots_of


def gather_attention_torch(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, places: Places | None = None, *, segments: Segments | None = None,
    scale: float | None = None, outside: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The same function as :func:`gather_attention_reference`, in time and memory that grow with the choices alone. There is no
    gradient of the gradient."""
    check_call(q, k, v, index)
    outside = outside_of(outside, q, segments)
    q, k, v, places = placed(q, k, v, places, segments)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    slots, c = slots_of(index, places, k.shape[1]), index.shape[2]
    if c > 1:  # each key head is a query of its own, with keys of its own
        slots = torch.where(slots < 0, -1, slots * c + torch.arange(c, device=q.device)[:, None]).flatten(1, 2)
        q, k, v = q.unflatten(2, (c, -1)).flatten(1, 2), k.flatten(1, 2)[:, :, None], v.flatten(1, 2)[:, :, None]
        outside = None if outside is None else outside.unflatten(2, (c, -1)).flatten(1, 2)
    slots = slots.squeeze(2) if c == 1 else slots
    if outside is None:
        y, mass = _attend_op(q, k, v, slots, scale)
        return y.unflatten(1, (-1, c)).flatten(2, 3).to(q.dtype), mass.unflatten(1, (-1, c))
    y, share, mass = _beside_op(q, outside, k, v, slots, scale)
    if not k.shape[1] * slots.shape[2]:  # no part was walked
        share = (outside > -torch.inf).to(share.dtype)
    y, share = (x.unflatten(1, (-1, c)).flatten(2, 3) for x in (y, share))
    return y.to(q.dtype), mass.unflatten(1, (-1, c)), share


def index_scores(q: Tensor, weights: Tensor, k: Tensor, index: Tensor, places: Places) -> Tensor:
    """(b t n), in float32 at least: sum_h weights_h relu(q_h . k_j) of the tokens j that ``index`` (b t n) names, 0 for none.
    ``q`` (b t h k), ``weights`` (b t h), ``k`` (b s k). What :func:`choose_tokens` ranks by, with a gradient."""
    _check_indexer(q, weights, k)
    scores: Tensor = _score_op(q, weights, k, slots_of(index, places, k.shape[1]), 1.0)[0]
    return scores


def index_products(q: Tensor, k: Tensor, index: Tensor, places: Places, scale: float) -> Tensor:
    """(b t c n), in float32 at least: scale * q . k_j of the tokens j that ``index`` (b t c n) names, 0 for none. ``q``
    (b t c k), ``k`` (b s k). What :func:`best_blocks` ranks by, with a gradient."""
    c, slots = q.shape[2], slots_of(index, places, k.shape[1])
    flat = _product_op(q.flatten(1, 2), k, slots.flatten(1, 2), scale)[0]
    scores: Tensor = flat.unflatten(1, (-1, c))
    return scores


def _check_indexer(q: Tensor, weights: Tensor, k: Tensor) -> None:
    fits = q.ndim == 4 and k.ndim == 3 and weights.shape == q.shape[:3]
    if not fits or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[3]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, weights, k))
        raise ConfigError(f"indexer: q (b t h k), weights (b t h), k (b s k) do not fit; got {shapes}")


def _attend(asked: Sequence[Tensor], keys: Sequence[Tensor], seen: Tensor, scale: float) -> tuple[Tensor, ...]:
    (q,), (k, v) = asked, keys
    m, h, g = *q.shape[:2], k.shape[2]
    scores = q.view(m, g, h // g, -1) @ k.permute(0, 2, 3, 1) * scale
    hidden = ~seen[:, None, None]
    alone = ~seen.any(-1)[:, None, None, None]
    weights = scores.masked_fill(hidden, -torch.inf).masked_fill(alone, 0.0).softmax(-1).masked_fill(hidden, 0.0)
    return (weights @ v.transpose(1, 2)).flatten(1, 2), weights.detach().sum((1, 2))


def _attend_beside(asked: Sequence[Tensor], keys: Sequence[Tensor], seen: Tensor, scale: float) -> tuple[Tensor, ...]:
    """:func:`_attend` with one more column of the softmax; its weight comes second."""
    (q, outside), (k, v) = asked, keys
    m, h, g = *q.shape[:2], k.shape[2]
    scores = (q.view(m, g, h // g, -1) @ k.permute(0, 2, 3, 1) * scale).masked_fill(~seen[:, None, None], -torch.inf)
    nothing = (outside == -torch.inf) & ~seen.any(-1, keepdim=True)
    column = outside.masked_fill(nothing, 0.0).view(m, g, h // g, 1)
    weights, share = torch.cat([scores, column], -1).softmax(-1).split([scores.shape[-1], 1], -1)
    y = (weights @ v.transpose(1, 2)).flatten(1, 2)
    return y, share.reshape(m, h).masked_fill(nothing, 0.0), weights.detach().sum((1, 2))


def _score(asked: Sequence[Tensor], keys: Sequence[Tensor], seen: Tensor, scale: float) -> tuple[Tensor, ...]:
    (q, weights), (k,) = asked, keys
    scores = (weights[:, None] @ (q @ k.transpose(1, 2)).relu())[:, 0]
    return (scores.masked_fill(~seen, 0.0),)


def _product(asked: Sequence[Tensor], keys: Sequence[Tensor], seen: Tensor, scale: float) -> tuple[Tensor, ...]:
    (q,), (k,) = asked, keys
    scores = (q[:, None] @ k.transpose(1, 2))[:, 0] * scale
    return (scores.masked_fill(~seen, 0.0),)


_attend_op = gather_op(
    "gather_attention", _attend, asked=("q",), keys=("k", "v"),
    like=lambda asked, keys, n: ((asked[0].shape[2], keys[1].shape[3]), (n,)),
)
_beside_op = gather_op(
    "gather_attention_beside", _attend_beside, asked=("q", "outside"), keys=("k", "v"), learned=2,
    like=lambda asked, keys, n: ((asked[0].shape[2], keys[1].shape[3]), (asked[0].shape[2],), (n,)),
)
_score_op = gather_op("index_scores", _score, asked=("q", "weights"), keys=("k",), like=lambda asked, keys, n: ((n,),))
_product_op = gather_op("index_products", _product, asked=("q",), keys=("k",), like=lambda asked, keys, n: ((n,),))
