"""A router's choice: the blocks whose keys, each block as one mean, score highest.

Axes: b batch, t queries, h query heads, g key heads, j blocks, k key dim, n choices.
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


def choose_blocks(q: Tensor, pooled: Tensor, first: Tensor, count: Tensor, n: int) -> Tensor:
    """(b t h n) int64: for each query the ``n`` of its blocks ``0 .. count - 1`` that score highest, best first; -1: fewer.

    ``q`` (b t h k), ``pooled`` (b j g k): one key a block; ``first`` (b t): where the blocks of the query's document begin in
    ``pooled``; ``count`` (b t): how many of them it may choose from. There is no gradient, as a choice has none. Time
    grows with t * j, memory with t alone. Raises :class:`ConfigError` for tensors that do not fit together.
    """
    b, t, h, width = q.shape
    fits = pooled.ndim == 4 and pooled.shape[0] == b and pooled.shape[3] == width and h % max(pooled.shape[2], 1) == 0
    if not fits or first.shape != (b, t) or count.shape != (b, t) or n < 0:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, pooled, first, count))
        raise ConfigError(f"choose_blocks: (b t h k), (b j g k), (b t), (b t) do not fit; got {shapes}, n = {n}")
    found: Tensor = _choose_op(q.detach(), pooled.detach(), first, count.view_as(count), n)
    return found


@torch.library.custom_op("hybridtf::choose_blocks", mutates_args=())
def _choose_op(q: Tensor, pooled: Tensor, first: Tensor, count: Tensor, n: int) -> Tensor:
    b, t, h, _ = q.shape
    j = pooled.shape[1]
    found = torch.full((b, t, h, n), -1, dtype=torch.int64, device=q.device)
    if not b * j * n:
        return found
    with no_autocast(q.device):
        keys = pooled.to(accumulate_dtype(q.dtype))
        budget = by_device(q.device, _BUDGET_CPU, _BUDGET_GPU)
        size = max(16, budget // (b * h * j))
        for start in range(0, t, size):
            part = slice(start, start + size)
            found[:, part, :, : min(n, j)] = _best(q[:, part].to(keys.dtype), keys, first[:, part], count[:, part], n)
    return found


@_choose_op.register_fake
def _(q: Tensor, pooled: Tensor, first: Tensor, count: Tensor, n: int) -> Tensor:
    b, t, h, _ = q.shape
    return q.new_empty(b, t, h, n, dtype=torch.int64)


@register_flop_formula(torch.ops.hybridtf.choose_blocks)
def _flops(q: Sequence[int], pooled: Sequence[int], *rest: Any, **more: Any) -> int:
    """Of every query with the key of every block. Arguments as shapes."""
    b, t, h, width = q
    return 2 * b * t * h * pooled[1] * width


def _best(q: Tensor, keys: Tensor, first: Tensor, count: Tensor, n: int) -> Tensor:
    b, t, h, width = q.shape
    j, g = keys.shape[1], keys.shape[2]
    rows = q.view(b, t, g, h // g, width).permute(0, 2, 3, 1, 4).reshape(b, g, -1, width)
    scores = (rows @ keys.permute(0, 2, 3, 1)).view(b, g, h // g, t, j)
    block = torch.arange(j, device=q.device) - first[..., None]
    inside = (block >= 0) & (block < count[..., None])
    scores = scores.masked_fill(~inside[:, None, None], -torch.inf)
    top = scores.topk(min(n, j), dim=-1)
    chosen = torch.where(top.values == -torch.inf, -1, top.indices - first[:, None, None, :, None])
    return chosen.permute(0, 3, 1, 2, 4).flatten(2, 3)
