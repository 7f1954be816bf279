"""How mixers tell positions to their queries and keys.

Axes: b batch, t time, h heads, g key heads, k head_dim, j chosen tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hybridtf.core import Position, QueryKeyPosition, Segments
from hybridtf.core.states.leaf import StateLeaf


class _Call(threading.local):
    """What the layers of one call share: positions, by where they start, and tables made of them."""

    positions: dict[Hashable, Tensor] | None = None
    tables: dict[Hashable, Any] | None = None


_call = _Call()


def shared_tables() -> AbstractContextManager[None]:
    """Inside, layers whose tokens stand at the same places tell them by one table. For one call of a stack without gradients:
    a graph would hold a table for all layers, and recomputing them would not find it."""
    alone = torch.compiler.is_compiling() or torch.is_grad_enabled() or _call.tables is not None
    return nullcontext() if alone else _sharing()


@contextmanager
def _sharing() -> Iterator[None]:
    _call.positions, _call.tables = {}, {}
    try:
        yield
    finally:
        _call.positions, _call.tables = None, None


def token_positions(like: Tensor, segments: Segments | None, leaf: StateLeaf | None) -> Tensor:
    """(b t) int64: the position of each token of ``like`` (b t ...) in its document, ``leaf`` having seen those before."""
    if segments is not None:
        return segments.positions(None if leaf is None else leaf.length)
    (b, t), start = like.shape[:2], 0 if leaf is None else leaf.known_length()
    if start is None:
        assert leaf is not None
        return torch.arange(t, device=like.device) + leaf.length[:, None]
    kept = None if torch.compiler.is_compiling() else _call.positions
    key = (b, t, start, like.device)
    if kept is not None and key in kept:
        return kept[key]
    positions = torch.arange(start, start + t, device=like.device).expand(b, -1)
    if kept is not None:
        kept[key] = positions
    return positions


def told(
    position: Position | None, q: Tensor, k: Tensor, positions: Tensor, segments: Segments | None, leaf: StateLeaf | None
) -> tuple[Tensor, Tensor]:
    """Queries (b t h k) and keys (b t g k) with their positions told, by one table; as they are for another site."""
    if not isinstance(position, QueryKeyPosition):
        return q, k
    lengths = None
    if position.uses_lengths and segments is not None:
        lengths = segments.document_length(None if leaf is None else leaf.length)
    table = _table(position, positions, q.dtype, None if leaf is None else leaf.max_len, lengths)
    return position(q, table), position(k, table)


def _table(
    position: QueryKeyPosition, positions: Tensor, dtype: torch.dtype, max_len: int | None, lengths: Tensor | None
) -> Any:
    shared = None if torch.compiler.is_compiling() else _call.tables
    of_position = None if shared is None or lengths is not None else position.table_key()
    # By identity, and of those alone that the call keeps: a number that another tensor had before would find its table.
    if shared is None or of_position is None or not any(positions is kept for kept in (_call.positions or {}).values()):
        return position.table(positions, dtype, max_len=max_len, lengths=lengths)
    key = (of_position, id(positions), dtype, max_len)
    if key not in shared:
        shared[key] = position.table(positions, dtype, max_len=max_len)
    return shared[key]


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
