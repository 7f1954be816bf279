"""An indexer's choice of blocks, each scored by its best token.

Axes: b batch, t queries, s slots of keys, c choosers, k their width, j blocks, l tokens of a block, n choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from hybridtf.core.errors import ConfigError
from hybridtf.ops.attention.mask import accumulate_dtype
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.block_sparse_attention import Places
from hybridtf.ops.gather_attention.choose import _latest_of_best
from hybridtf.ops.spans import by_device

_BUDGET_CPU, _BUDGET_GPU = 2**20, 2**26


class BestBlocks(NamedTuple):
    """What :func:`best_blocks` chose."""

    blocks: Tensor
    """(b t c n) int64, -1: none."""
    tokens: Tensor
    """(b t c n) int64: the position of each block's best token, -1: none."""


def best_blocks(q: Tensor, k: Tensor, places: Places, n: int, *, size: int, local: int) -> BestBlocks:
    """For each query and chooser the ``n`` blocks of its document, of ``size`` tokens from the start, whose best token up to
    the query has the largest q . k_j. The ``local`` last blocks up to the query's own are chosen first, whatever they score; of
    blocks that score the same the later ones come first.

    ``q`` (b t c k), ``k`` (b s k), of documents that are held from their start on. There is no gradient, as a choice has none.
    Time grows with t * s, memory with t + s. Raises :class:`ConfigError` for tensors that do not fit together.
    """
    if q.ndim != 4 or k.ndim != 3 or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[3] or not 0 <= local <= n:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k))
        raise ConfigError(f"best_blocks: q (b t c k), k (b s k) and local <= n do not fit; got {shapes}, {local}, {n}")
    where = (x.view_as(x) for x in (places.position, places.first, places.count))
    blocks, tokens = _best_op(q.detach(), k.detach(), *where, n, size, local)
    return BestBlocks(blocks, tokens)


@torch.library.custom_op("hybridtf::best_blocks", mutates_args=())
def _best_op(
    q: Tensor, k: Tensor, position: Tensor, first: Tensor, count: Tensor, n: int, size: int, local: int
) -> tuple[Tensor, Tensor]:
    (b, t, c, _), s = q.shape, k.shape[1]
    blocks = torch.full((b, t, c, n), -1, dtype=torch.int64, device=q.device)
    tokens = blocks.clone()
    n_blocks = -(-s // size)
    most = min(n, n_blocks)
    if not b * s * most:
        return blocks, tokens
    with no_autocast(q.device):
        keys = k.to(accumulate_dtype(q.dtype)).transpose(1, 2)
        budget = by_device(q.device, _BUDGET_CPU, _BUDGET_GPU)
        step = max(16, budget // (b * c * s))
        places = torch.arange(n_blocks * size, device=q.device)
        for begin in range(0, t, step):
            part = slice(begin, begin + step)
            p, one, many = (x[:, part, None] for x in (position, first, count))
            scores = (q[:, part].to(keys.dtype).flatten(1, 2) @ keys).unflatten(1, (-1, c))
            scores = scores.gather(-1, torch.remainder(one + places, s)[:, :, None].expand(-1, -1, c, -1))
            seen = (places < many) & (places <= p)
            best = scores.masked_fill(~seen[:, :, None], -torch.inf).unflatten(-1, (n_blocks, size)).max(-1)
            found = _choice(best.values, (p // size)[:, :, None], most, local)
            within = best.indices.gather(-1, found.clamp(min=0))
            blocks[:, part, :, :most] = found
            tokens[:, part, :, :most] = torch.where(found < 0, -1, found * size + within)
    return blocks, tokens


@_best_op.register_fake
def _(
    q: Tensor, k: Tensor, position: Tensor, first: Tensor, count: Tensor, n: int, size: int, local: int
) -> tuple[Tensor, Tensor]:
    blocks = q.new_empty(*q.shape[:3], n, dtype=torch.int64)
    return blocks, torch.empty_like(blocks)


@register_flop_formula(torch.ops.hybridtf.best_blocks)
def _flops(q: Sequence[int], k: Sequence[int], *rest: Any, **more: Any) -> int:
    """Of every query with every key. Arguments as shapes."""
    b, t, c, width = q
    return 2 * b * t * c * k[1] * width


def _choice(scores: Tensor, own: Tensor, n: int, local: int) -> Tensor:
    """(b m c n) of the scores of blocks (b m c j), -inf for those that are not seen."""
    block = torch.arange(scores.shape[-1], device=scores.device)
    near = (block <= own) & (block > own - local) & (scores > -torch.inf)
    return _latest_of_best(scores.masked_fill(near, torch.inf), block.expand_as(scores), n)
