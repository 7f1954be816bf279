"""The blocks on which attention to compressed blocks falls most (Native Sparse Attention).

Axes: b batch, t queries, h query heads, g key heads, r heads of a key head, i compressed blocks, j blocks to choose from, k key
dim, n choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from hybridtf.core.errors import ConfigError
from hybridtf.ops.attention.mask import accumulate_dtype
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.spans import by_device

_BUDGET_CPU, _BUDGET_GPU = 2**20, 2**26


def important_blocks(
    q: Tensor, compressed: Tensor, first: Tensor, count: Tensor, own: Tensor, n: int, *, ratio: int, spread: int, scale: float
) -> Tensor:
    """(b t g n) int64: ids of the ``n`` blocks of its document up to its ``own`` (b t) on which a query's weights over the
    compressed blocks fall most, summed over the heads of a key head; -1: fewer. The own block, the first and the one before
    the own come first, whatever their weight.

    ``q`` (b t h k), ``compressed`` (b i g k); ``first``, ``count`` (b t): where the query's compressed blocks begin, and
    how many it sees. A block is ``ratio`` strides of compressed blocks long, a compressed block ``spread``: compressed
    block i weighs on the blocks (i + m) // ratio for m < spread. There is no gradient, as a choice has none. Time grows
    with t * i, memory with t + i. Raises :class:`ConfigError` for tensors that do not fit together.
    """
    b, t, h, width = q.shape
    fits = compressed.ndim == 4 and compressed.shape[0] == b and compressed.shape[3] == width and compressed.shape[2]
    if not fits or h % compressed.shape[2] or any(x.shape != (b, t) for x in (first, count, own)):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, compressed, first, count, own))
        raise ConfigError(f"important_blocks: (b t h k), (b i g k), (b t), (b t), (b t) do not fit; got {shapes}")
    where = (x.view_as(x) for x in (first, count, own))
    found: Tensor = _important_op(q.detach(), compressed.detach(), *where, n, ratio, spread, scale)
    return found


@torch.library.custom_op("hybridtf::important_blocks", mutates_args=())
def _important_op(
    q: Tensor, compressed: Tensor, first: Tensor, count: Tensor, own: Tensor, n: int, ratio: int, spread: int, scale: float
) -> Tensor:
    (b, t, h, _), (i, g) = q.shape, compressed.shape[1:3]
    found = torch.full((b, t, g, n), -1, dtype=torch.int64, device=q.device)
    if not b * t * n:
        return found
    most = int(own.amax()) + 1
    with no_autocast(q.device):
        keys = compressed.to(accumulate_dtype(q.dtype)).permute(0, 2, 3, 1)
        budget = by_device(q.device, _BUDGET_CPU, _BUDGET_GPU)
        size = max(16, budget // (b * h * max(i, most)))
        for start in range(0, t, size):
            part = slice(start, start + size)
            weights = _weights(q[:, part].to(keys.dtype), keys, first[:, part], count[:, part], scale)
            score = _on_blocks(weights, first[:, part], most, ratio, spread)
            found[:, part, :, : min(n, most)] = _best(score, own[:, part, None, None], min(n, most))
    return found


@_important_op.register_fake
def _(
    q: Tensor, compressed: Tensor, first: Tensor, count: Tensor, own: Tensor, n: int, ratio: int, spread: int, scale: float
) -> Tensor:
    return q.new_empty(*q.shape[:2], compressed.shape[2], n, dtype=torch.int64)


@register_flop_formula(torch.ops.hybridtf.important_blocks)
def _flops(q: Sequence[int], compressed: Sequence[int], *rest: Any, **more: Any) -> int:
    """Of every query with the key of every block. Arguments as shapes."""
    b, t, h, width = q
    return 2 * b * t * h * compressed[1] * width


def _weights(q: Tensor, keys: Tensor, first: Tensor, count: Tensor, scale: float) -> Tensor:
    """(b m g i): softmax over the compressed blocks that each query sees, summed over the heads of a key head."""
    b, m, h, width = q.shape
    g, i = keys.shape[1], keys.shape[3]
    rows = q.view(b, m, g, h // g, width).permute(0, 2, 3, 1, 4).reshape(b, g, -1, width)
    scores = (rows @ keys).view(b, g, h // g, m, i) * scale
    block = torch.arange(i, device=q.device) - first[..., None]
    hidden = ((block < 0) | (block >= count[..., None]))[:, None, None]
    alone = hidden.all(-1, keepdim=True)
    weights = scores.masked_fill(hidden, -torch.inf).masked_fill(alone, 0.0).softmax(-1).masked_fill(hidden, 0.0)
    return weights.sum(2).transpose(1, 2)


def _on_blocks(weights: Tensor, first: Tensor, most: int, ratio: int, spread: int) -> Tensor:
    """(b m g j): what falls on each block to choose from."""
    block = (torch.arange(weights.shape[3], device=weights.device) - first[..., None]).clamp(min=0)[:, :, None]
    score = weights.new_zeros(*weights.shape[:3], most)
    for m in range(spread):
        target = torch.div(block + m, ratio, rounding_mode="floor").clamp(max=most - 1).expand_as(weights)
        score.scatter_add_(-1, target, weights)
    return score


def _best(score: Tensor, own: Tensor, n: int) -> Tensor:
    block = torch.arange(score.shape[-1], device=score.device)
    for rank, always in enumerate((own - 1, torch.zeros_like(own), own)):
        score = torch.where(block == always, 1e30 * (rank + 1), score)
    top = score.masked_fill(block > own, -torch.inf).topk(n, dim=-1)
    return torch.where(top.values == -torch.inf, -1, top.indices)
