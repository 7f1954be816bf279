"""Block sparse attention from its parts: each part is one softmax over the keys that no earlier part has shown; their
outputs are put together by the logs of their sums.

Axes: b batch, t queries, s keys, h query heads, g key heads, c choosers, i parts, k key dim, v value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.ops.block_sparse_attention.grouped import PARTS, attend_part, clauses_of
from hybridtf.ops.block_sparse_attention.rule import Places, SparseRule, check_call


def block_sparse_attention_torch(
    q: Tensor, k: Tensor, v: Tensor, places: Places, rule: SparseRule, *, marked: Tensor | None = None,
    blocks: Tensor | None = None, scale: float | None = None,
) -> Tensor:
    """The same function as :func:`block_sparse_attention_reference`, in memory linear in length, and in time that grows with
    the keys that are seen. A query's ``blocks`` must differ from each other, but for -1; there is no gradient of the
    gradient.
    """
    check_call(q, k, v, places, rule, marked, blocks)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    outs: list[Tensor] = []
    logs: list[Tensor] = []
    for part in PARTS:
        if (part == "chosen" and blocks is None) or not clauses_of(rule, part, marked is not None):
            continue
        y, lse = attend_part(q, k, v, places, rule, part, marked, blocks, scale)
        choices = blocks if part == "chosen" else None
        outs.append(_choices_last(y, q, choices))
        logs.append(_choices_last(lse, q, choices))
    if len(outs) == 1 and logs[0].shape[-1] == 1:
        return outs[0][:, :, :, 0].to(q.dtype)
    return _together(torch.cat(outs, 3), torch.cat(logs, 3)).to(q.dtype)


def _choices_last(x: Tensor, q: Tensor, blocks: Tensor | None) -> Tensor:
    """A flat result of a part as (b t h i ...): one part, or one for each choice."""
    b, t, h, _ = q.shape
    if blocks is None:
        return x.view(b, t, h, 1, *x.shape[2:])
    c, n = blocks.shape[2:]
    return x.view(b, t, c, n, h // c, *x.shape[2:]).transpose(3, 4).flatten(2, 3)


def _together(y: Tensor, lse: Tensor) -> Tensor:
    """(b t h i v), (b t h i) -> (b t h v): parts weighted by their sums; zero where all are empty."""
    if not lse.shape[-1]:
        return y.sum(3)
    top = lse.detach().amax(-1, keepdim=True)
    weights = (lse - top.masked_fill(top == -torch.inf, 0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    share = weights / total.masked_fill(total == 0, 1.0)
    return (share[..., None] * y).sum(3)
