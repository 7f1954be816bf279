"""Attention-like ops that need a query's whole row of scores at once: by chunks of queries, in memory linear in length.

Axes: b batch, t queries, s keys, h heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hybridtf.ops.attention.mask import AttentionMask, Tile, whole
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.spans import by_device

# Scores of a chunk (b h queries s): what was fastest on a CPU, and enough to fill a GPU (a guess).
_SCORES_CPU = 2**19
_SCORES_GPU = 2**26
# Fewer queries at once than this would make many calls of a long row.
_FEWEST = 128


def by_query_chunks(
    run: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, chunk_size: int | None, *fixed: Any,
    fewest: int = _FEWEST,
) -> Any:
    """``run(q, k, v, tile, mask, *fixed)`` over chunks of queries (b t ...), each with the keys it has to look at; results are
    tensors (b t ...), or tuples of such, side by side. A chunk is computed again for its gradients.

    ``tile``: which queries and keys of ``mask`` a chunk's are. ``chunk_size``: queries of a chunk; None: by the
    shapes, and at least ``fewest``.
    """
    t = q.shape[1]
    size = _size_of(q, k, fewest) if chunk_size is None else chunk_size
    with no_autocast(q.device):
        if t <= size:
            return run(q, k, v, whole(q, k), mask, *fixed)
        parts = []
        for start in range(0, t, size):
            stop = min(start + size, t)
            tile, keys = _tile(q, k, mask, start, stop)
            given = (q[:, start:stop], k[:, :keys], v[:, :keys], tile, mask, *fixed)
            # Nothing is drawn at random inside: no state of a generator to keep.
            parts.append(checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False))
        return pytree.tree_map(lambda *some: torch.cat(some, dim=1), *parts)


def _size_of(q: Tensor, k: Tensor, fewest: int) -> int:
    budget = by_device(q.device, _SCORES_CPU, _SCORES_GPU)
    size: int = torch.sym_max(fewest, budget // torch.sym_max(1, q.shape[0] * q.shape[2] * k.shape[1]))
    return size


def _tile(q: Tensor, k: Tensor, mask: AttentionMask, start: int, stop: int) -> tuple[Tile, int]:
    """The rectangle of a chunk of queries, and how many keys it has to look at."""
    tile = whole(q, k)
    # Without positions the queries are the last of the keys: later keys are surely hidden, unless a prefix shows them.
    later = mask.causal and mask.q_pos is None and mask.prefix_len is None
    keys = max(tile.s - tile.t + stop, 0) if later else tile.s
    return replace(tile, q0=start, q1=stop, k1=keys), keys
