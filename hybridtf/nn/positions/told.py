"""How mixers tell positions to their queries and keys.

Axes: b batch, t time, h heads, g key heads, k head_dim, j chosen tokens.
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


def told_at(
    position: Position | None, k: Tensor, positions: Tensor, columns: Tensor, back: int, segments: Segments | None,
    leaf: StateLeaf | None,
) -> Tensor:
    """Keys (b j g k), each told the position ``back`` before that of the token at one of ``columns`` (b j), with that token's
    document; ``positions`` (b t). As they are for another site."""
    if not isinstance(position, QueryKeyPosition):
        return k
    lengths = None
    if position.uses_lengths and positions.shape[1]:
        whole = (positions.amax(1, keepdim=True) + 1).expand_as(positions)
        if segments is not None:
            whole = segments.document_length(None if leaf is None else leaf.length)
        lengths = whole.gather(1, columns)
    at = (positions.gather(1, columns) - back).clamp(min=0)
    table = position.table(at, k.dtype, max_len=None if leaf is None else leaf.max_len, lengths=lengths)
    told_k: Tensor = position(k, table)
    return told_k
