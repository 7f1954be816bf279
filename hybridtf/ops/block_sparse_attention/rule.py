"""What a query sees: a fixed rule over positions in its document, and where the keys of that document lie.

Axes: b batch, t queries, s keys, h query heads, g key heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError


@dataclass(frozen=True)
class SparseRule:
    """A query at position p sees a key at position j of its document where any of these holds (0 turns one off); under
    ``causal`` only where also j <= p.

    ``window``, ``dilation``: |p - j| is a multiple of ``dilation`` and smaller than ``window * dilation``.
    ``near``: their blocks are the same or fewer than ``near`` apart.
    ``first``, ``last``: j is in one of the so many leading or closing blocks of the document.
    ``summary``: j is among the last ``summary`` tokens of its block.
    ``stride``: p - j is a multiple of ``stride`` (1: every key).

    Blocks have ``block`` tokens and count from the document's start. Raises :class:`ConfigError` for sizes out of range.
    """

    block: int = 64
    causal: bool = True
    window: int = 0
    dilation: int = 1
    near: int = 0
    first: int = 0
    last: int = 0
    summary: int = 0
    stride: int = 0

    def __post_init__(self) -> None:
        for name, least in (("block", 1), ("dilation", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"sparse rule: {name} must be at least {least}; got {getattr(self, name)}")
        for name in ("window", "near", "first", "last", "summary", "stride"):
            if getattr(self, name) < 0:
                raise ConfigError(f"sparse rule: {name} must be 0 (off) or more; got {getattr(self, name)}")
        if self.summary > self.block:
            raise ConfigError(f"sparse rule: summary = {self.summary} is more than the block of {self.block}")
        if self.causal and self.last:
            raise ConfigError("sparse rule: a causal query cannot see the closing blocks of its document: last must be 0")

    @property
    def clauses(self) -> tuple[str, ...]:
        """Clauses that are on, in the order in which a key that several show is counted."""
        names = ("window", "near", "first", "last", "summary", "stride")
        return tuple(name for name in names if getattr(self, name))

    def shows(self, clause: str, p: Tensor, j: Tensor, total: Tensor) -> Tensor:
        """Whether one clause shows keys at ``j`` to queries at ``p`` (broadcast), in documents of ``total`` tokens so far."""
        size = self.block
        if clause == "window":
            apart = (p - j).abs()
            return (apart < self.window * self.dilation) & (apart % self.dilation == 0)
        if clause == "near":
            return (p // size - j // size).abs() < self.near
        if clause == "first":
            return j < self.first * size
        if clause == "last":
            return j // size > (total - 1) // size - self.last
        if clause == "summary":
            return j % size >= size - self.summary
        return (p - j) % self.stride == 0


@dataclass(frozen=True, eq=False)
class Places:
    """Where queries stand and where the keys of their documents lie, all (b t) int64.

    The keys of a document are consecutive tokens in consecutive slots of its row; the row's last slot is followed by its first
    (a ring), but where keys are marked.
    ``position``: of the query in its document. ``first``: the slot of the document's first held key; documents of a row
    differ in it. ``start``: the position of that key (0 unless older keys were dropped). ``count``: keys of the document, 0
    for a query that sees nothing (a pad).
    """

    position: Tensor
    first: Tensor
    start: Tensor
    count: Tensor

    def only(self, queries: Tensor) -> Places:
        """The same with nothing in sight of queries outside of ``queries`` (b t, bool)."""
        return Places(self.position, self.first, self.start, self.count.masked_fill(~queries, 0))

    @classmethod
    def default(cls, b: int, t: int, s: int, device: torch.device) -> Places:
        """One document a row: keys 0..s-1, queries s-t..s-1."""
        position = torch.arange(s - t, s, device=device).expand(b, t)
        zero = torch.zeros_like(position)
        return cls(position, zero, zero, torch.full_like(position, s))


def check_call(
    q: Tensor, k: Tensor, v: Tensor, places: Places, rule: SparseRule, marked: Tensor | None, blocks: Tensor | None
) -> None:
    """Raises :class:`ConfigError` where the tensors of a call do not fit together."""
    shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
        raise ConfigError(f"block_sparse_attention: q, k and v are (b t h k), (b s g k), (b s g v); got {shapes}")
    b, t, h, width = q.shape
    s, g = k.shape[1], k.shape[2]
    if k.shape[0] != b or k.shape[3] != width or g == 0 or h % g:
        raise ConfigError(f"block_sparse_attention: q (b t h k), k (b s g k), v (b s g v) do not fit; got {shapes}")
    for name, value in vars(places).items():
        if value.shape != (b, t):
            raise ConfigError(f"block_sparse_attention: places.{name} must be {(b, t)}; got {tuple(value.shape)}")
    if marked is not None and (marked.shape != (b, s) or marked.dtype != torch.bool):
        raise ConfigError(f"block_sparse_attention: marked must be bool {(b, s)}; got {marked.dtype} {tuple(marked.shape)}")
    if blocks is not None:
        _check_blocks(blocks, b, t, h, g)
    elif not rule.clauses and marked is None:
        raise ConfigError("block_sparse_attention: the rule shows nothing, and there are neither marked keys nor blocks")


def _check_blocks(blocks: Tensor, b: int, t: int, h: int, g: int) -> None:
    if blocks.ndim != 4 or blocks.shape[:2] != (b, t) or blocks.shape[2] not in (1, g, h) or blocks.dtype != torch.int64:
        raise ConfigError(
            f"block_sparse_attention: blocks must be int64 (b t c n) with c = 1, {g} key heads or {h} query heads; "
            f"got {blocks.dtype} {tuple(blocks.shape)}"
        )
