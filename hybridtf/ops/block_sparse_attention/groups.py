"""Queries that share their keys, side by side: what lets one product serve many of them.

Axes: n groups, m queries of a group, b batch, t queries, c choosers (heads with blocks of their own), i choices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtf.ops.block_sparse_attention.rule import Places, SparseRule

_LAST = torch.iinfo(torch.int64).max


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of queries of one document.

    ``source`` (n m): the query's index in (b t c) flattened, ``target`` (n m) where its result goes; -1 where a group is
    not full. ``low``, ``high`` (n): positions of the first and the last query. ``row``, ``chooser`` and ``block`` (n): the
    block that a router chose. The rest (n) as in :class:`Places`.
    """

    source: Tensor
    target: Tensor
    low: Tensor
    high: Tensor
    row: Tensor
    first: Tensor
    start: Tensor
    count: Tensor
    chooser: Tensor
    block: Tensor

    def take(self, index: Tensor) -> Groups:
        """Those groups alone."""
        return Groups(*(x[index] for x in vars(self).values()))


def by_position(places: Places, rule: SparseRule, step: int, size: int) -> Groups:
    """Groups of up to ``size`` queries whose positions are ``step`` apart, within one block of the document (``step`` 1)."""
    p = places.position
    rows = torch.arange(p.shape[0], device=p.device)[:, None].expand_as(p)
    if size == 1:
        return _alone(places, rows, torch.arange(p.numel(), device=p.device), None)
    key = (rows * (_span(places) + 1) + places.first) * step + p % step
    bands = -(-rule.block // size)  # of a block
    band = p // rule.block * bands + p % rule.block // size if step == 1 else p // step // size
    order = torch.argsort(key.masked_fill(places.count == 0, _LAST).flatten(), stable=True)
    order = order[: int((places.count > 0).sum())]
    key, band = key.flatten()[order], band.flatten()[order]
    index, heads = _cut((key, band), size)
    return _made(places, rows, order, order, index, heads, size, chooser=None, block=None)


def by_block(places: Places, rule: SparseRule, blocks: Tensor, size: int) -> Groups:
    """Groups of up to ``size`` queries that chose one block: every (query, chooser, choice) is a member by itself."""
    b, t, c, n = blocks.shape
    p = places.position[..., None, None].expand_as(blocks)
    end = (places.start + places.count)[..., None, None]
    live = (blocks >= 0) & (blocks * rule.block < end) & (places.count > 0)[..., None, None]
    if rule.causal:
        live = live & (blocks * rule.block <= p)
    rows = torch.arange(b, device=p.device)[:, None].expand(b, t)
    if size == 1:
        return _alone(places, rows, torch.arange(blocks.numel(), device=p.device), blocks.masked_fill(~live, -1))
    document = (rows * (_span(places) + 1) + places.first)[..., None] * c + torch.arange(c, device=p.device)
    most = int(blocks.amax()) + 1 if blocks.numel() else 1
    key = document[..., None] * max(most, 1) + blocks
    order = torch.argsort(key.masked_fill(~live, _LAST).flatten(), stable=True)[: int(live.sum())]
    index, heads = _cut((key.flatten()[order],), size)
    unit = torch.div(order, n, rounding_mode="floor")
    return _made(places, rows, unit, order, index, heads, size, chooser=unit % c, block=blocks.flatten()[order], choosers=c)


def _alone(places: Places, rows: Tensor, target: Tensor, blocks: Tensor | None) -> Groups:
    """Every member a group by itself, those that see nothing too: what one token a row needs no sorting for."""
    c, n = (1, 1) if blocks is None else blocks.shape[2:]
    source = torch.div(target, n, rounding_mode="floor")
    token = torch.div(source, c, rounding_mode="floor")
    position, first, start, count = (x.flatten()[token] for x in vars(places).values())
    chosen = torch.zeros_like(token) if blocks is None else blocks.flatten()
    return Groups(
        source[:, None], target[:, None], position, position, rows.flatten()[token], first, start, count, source % c, chosen
    )


def _span(places: Places) -> int:
    """More than any slot at which a document starts."""
    return int(places.first.amax()) + 1 if places.first.numel() else 1


def _cut(keys: tuple[Tensor, ...], size: int) -> tuple[Tensor, Tensor]:
    """For sorted members the index of their group, and the member that opens each group (of equal keys, at most ``size``)."""
    steps = torch.arange(len(keys[0]), device=keys[0].device)
    new = steps == 0
    for key in keys:
        new = new | (key != key.roll(1))
    run = torch.where(new, steps, 0).cummax(0).values if len(steps) else steps
    new = new | ((steps - run) % size == 0)
    return new.cumsum(0) - 1, new.nonzero()[:, 0]


def _made(
    places: Places, rows: Tensor, source: Tensor, target: Tensor, index: Tensor, heads: Tensor, size: int, *,
    chooser: Tensor | None, block: Tensor | None, choosers: int = 1,
) -> Groups:
    place = torch.arange(len(index), device=index.device) - heads[index]
    table = source.new_full((2, len(heads), size), -1)
    table[0, index, place] = source
    table[1, index, place] = target
    tails = torch.cat([heads[1:], heads.new_full((1,), len(index))])[: len(heads)] - 1
    token = torch.div(source, choosers, rounding_mode="floor")
    lead = token[heads]
    position, first, start, count = (x.flatten() for x in vars(places).values())
    zero = torch.zeros_like(lead)
    return Groups(
        table[0], table[1], position[lead], position[token[tails]], rows.flatten()[lead], first[lead], start[lead], count[lead],
        zero if chooser is None else chooser[heads], zero if block is None else block[heads],
    )
