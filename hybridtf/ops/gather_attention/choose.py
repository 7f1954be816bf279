"""An indexer's choice: the tokens that score highest for each query.

Axes: b batch, t queries, s slots of keys, h heads of the indexer, k their width, n choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from hybridtf.ops.attention.mask import accumulate_dtype
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.block_sparse_attention import Places
from hybridtf.ops.gather_attention.chosen import _check_indexer
from hybridtf.ops.spans import by_device

_BUDGET_CPU, _BUDGET_GPU = 2**20, 2**26


def choose_tokens(q: Tensor, weights: Tensor, k: Tensor, places: Places, n: int) -> Tensor:
    """(b t n) int64: positions of the ``n`` tokens of its document, up to itself, for which sum_h weights_h relu(q_h . k_j) is
    largest; -1: fewer. Of tokens that score the same the later ones come first.

    ``q`` (b t h k), ``weights`` (b t h), ``k`` (b s k). There is no gradient, as a choice has none. Time grows with t * s,
    memory with t + s. Raises :class:`ConfigError` for tensors that do not fit together.
    """
    _check_indexer(q, weights, k)
    where = (x.view_as(x) for x in (places.position, places.first, places.start, places.count))
    found: Tensor = _choose_op(q.detach(), weights.detach(), k.detach(), *where, n)
    return found


@torch.library.custom_op("hybridtf::choose_tokens", mutates_args=())
def _choose_op(
    q: Tensor, weights: Tensor, k: Tensor, position: Tensor, first: Tensor, start: Tensor, count: Tensor, n: int
) -> Tensor:
    (b, t, h, _), s = q.shape, k.shape[1]
    found = torch.full((b, t, n), -1, dtype=torch.int64, device=q.device)
    if not b * s * n:
        return found
    with no_autocast(q.device):
        keys = k.to(accumulate_dtype(q.dtype)).transpose(1, 2)
        budget = by_device(q.device, _BUDGET_CPU, _BUDGET_GPU)
        size = max(16, budget // (b * h * s))
        slots = torch.arange(s, device=q.device)
        for begin in range(0, t, size):
            part = slice(begin, begin + size)
            p, one, old, many = (x[:, part, None] for x in (position, first, start, count))
            place = torch.remainder(slots - one, s)
            seen = (place < many) & (place + old <= p)
            scores = _scores(q[:, part].to(keys.dtype), weights[:, part].to(keys.dtype), keys)
            top = _latest_of_best(scores.masked_fill(~seen, -torch.inf), place + old, min(n, s))
            found[:, part, : min(n, s)] = top
    return found


@_choose_op.register_fake
def _(q: Tensor, weights: Tensor, k: Tensor, position: Tensor, first: Tensor, start: Tensor, count: Tensor, n: int) -> Tensor:
    return q.new_empty(*q.shape[:2], n, dtype=torch.int64)


@register_flop_formula(torch.ops.hybridtf.choose_tokens)
def _flops(q: Sequence[int], weights: Sequence[int], k: Sequence[int], *rest: Any, **more: Any) -> int:
    """Of every query with every key in each head, and the sum over heads. Arguments as shapes."""
    b, t, h, width = q
    return 2 * b * t * h * k[1] * (width + 1)


def _scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """(b m s) of queries (b m h k), weights (b m h) and keys (b k s)."""
    b, m, h, _ = q.shape
    products = (q.flatten(1, 2) @ keys).view(b, m, h, -1).relu_()
    return (weights[:, :, None] @ products)[:, :, 0]


def _latest_of_best(scores: Tensor, position: Tensor, n: int) -> Tensor:
    """(b m n): positions of the highest scores, later ones first where scores are the same; -1 for a score of -inf."""
    top = scores.topk(n, dim=-1)
    last = top.values[..., -1:]
    above = top.values > last
    # topk breaks ties as it likes, and not alike for other lengths: ties with the last are chosen again, by position.
    tied = torch.where((scores == last) & (scores > -torch.inf), position, -1).topk(n, dim=-1).values
    behind = (torch.arange(n, device=scores.device) - above.sum(-1, keepdim=True)).clamp(min=0)
    return torch.where(above, position.gather(-1, top.indices), tied.gather(-1, behind))
