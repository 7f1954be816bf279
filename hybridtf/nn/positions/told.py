"""How mixers tell positions to their queries and keys.

Axes: b batch, t time, h heads, g key heads, k head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core import Position, QueryKeyPosition, Segments
from hybridtf.core.states.leaf import StateLeaf


def token_positions(like: Tensor, segments: Segments | None, leaf: StateLeaf | None) -> Tensor:
    """(b t) int64: the position of each token of ``like`` (b t ...) in its document, ``leaf`` having seen those before."""
    if segments is not None:
        return segments.positions(None if leaf is None else leaf.length)
    steps = torch.arange(like.shape[1], device=like.device).expand(like.shape[0], -1)
    return steps if leaf is None else steps + leaf.length[:, None]


def told(
    position: Position | None, q: Tensor, k: Tensor, positions: Tensor, segments: Segments | None, leaf: StateLeaf | None
) -> tuple[Tensor, Tensor]:
    """Queries (b t h k) and keys (b t g k) with their positions told, by one table; as they are for another site."""
    if not isinstance(position, QueryKeyPosition):
        return q, k
    lengths = None
    if position.uses_lengths and segments is not None:
        lengths = segments.document_length(None if leaf is None else leaf.length)
    table = position.table(positions, q.dtype, max_len=None if leaf is None else leaf.max_len, lengths=lengths)
    return position(q, table), position(k, table)
