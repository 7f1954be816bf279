"""Block sparse attention from its parts: each part is one softmax over the keys that no earlier part has shown; their
outputs are put together by the logs of their sums.

Axes: b batch, t queries, s keys, h query heads, g key heads, c choosers, i parts, k key dim, v value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.ops.block_sparse_attention.grouped import attend_part
from hybridtf.ops.block_sparse_attention.parts import PARTS, clauses_of
from hybridtf.ops.block_sparse_attention.rule import Places, SparseRule, check_call


def block_sparse_attention_torch(
    q: Tensor, k: Tensor, v: Tensor, places: Places, rule: SparseRule, *, marked: Tensor | None = None,
    blocks: Tensor | None = None, scale: float | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
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
        y, lse = outs[0][:, :, :, 0], logs[0][..., 0]
    else:
        y, lse = _together(torch.cat(outs, 3), torch.cat(logs, 3))
    return (y.to(q.dtype), lse) if return_lse else y.to(q.dtype)


def _choices_last(x: Tensor, q: Tensor, blocks: Tensor | None) -> Tensor:
    """A flat result of a part as (b t h i ...): one part, or one for each choice."""
    b, t, h, _ = q.shape
    if blocks is None:
        return x.view(b, t, h, 1, *x.shape[2:])
    c, n = blocks.shape[2:]
    return x.view(b, t, c, n, h // c, *x.shape[2:]).transpose(3, 4).flatten(2, 3)


def _together(y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """(b t h i v), (b t h i) -> (b t h v), (b t h): parts weighted by their sums, and the logs of the sums of those; zero and
    -inf where all are empty."""
    if not lse.shape[-1]:
        return y.sum(3), lse.sum(3) - torch.inf
    top = lse.detach().amax(-1, keepdim=True)
    base = top.masked_fill(top == -torch.inf, 0.0)
    weights = (lse - base).exp()
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    whole = (base + total.log()).masked_fill(empty, -torch.inf)
    return ((weights / total)[..., None] * y).sum(3), whole[..., 0]
