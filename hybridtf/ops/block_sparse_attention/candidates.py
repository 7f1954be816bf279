"""Keys that a group of queries may see: for each clause of a rule a short list of positions.

Axes: n groups, m queries of a group, l keys of a list.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtf.ops.block_sparse_attention.groups import Groups
from hybridtf.ops.block_sparse_attention.rule import SparseRule


@dataclass(frozen=True, eq=False)
class Lists:
    """One list of positions a group: ``begin + step * [0, length)``; for ``summary`` and ``marked`` these count entries."""

    clause: str
    begin: Tensor
    length: Tensor
    step: int = 1

    def take(self, index: Tensor) -> Lists:
        return Lists(self.clause, self.begin[index], self.length[index], self.step)

    def entries(self, width: int) -> Tensor:
        """(n width)"""
        return self.begin[:, None] + self.step * torch.arange(width, device=self.begin.device)


@dataclass(frozen=True, eq=False)
class Marks:
    """Marked keys of all rows, row after row: ``slots`` (entries) in their rows, ``before`` (b, s + 1) entries before each
    slot, counted over all rows."""

    slots: Tensor
    before: Tensor

    @classmethod
    def of(cls, marked: Tensor) -> Marks:
        flat = marked.flatten().to(torch.int64).cumsum(0).view(marked.shape)
        before = flat - marked.to(torch.int64)
        last = flat[:, -1:] if marked.shape[1] else flat.new_zeros(len(flat), 1)
        return cls(marked.nonzero()[:, 1], torch.cat([before, last], 1))


def lists_of(clause: str, groups: Groups, rule: SparseRule, marks: Marks | None) -> Lists:
    """What one clause may show to each group."""
    size, low, high = rule.block, groups.low, groups.high
    total = groups.start + groups.count
    top = high if rule.causal else total - 1  # the last position in sight
    if clause == "marked":
        assert marks is not None
        begin = marks.before[groups.row, groups.first]
        return Lists(clause, begin, marks.before[groups.row, groups.first + groups.count] - begin)
    if clause == "chosen":
        begin = groups.block * size
        return Lists(clause, begin, torch.minimum(top + 1, begin + size) - begin)
    if clause == "summary":
        return Lists(clause, torch.zeros_like(low), (top // size + 1) * rule.summary)
    step, begin, end = 1, torch.zeros_like(low), top
    if clause == "window":
        step, reach = rule.dilation, (rule.window - 1) * rule.dilation
        # Positions below the first are not visited; the step's phase is kept.
        begin = torch.where(low >= reach, low - reach, low % step)
        end = high if rule.causal else torch.minimum(high + reach, top)
    elif clause == "near":
        begin = ((low // size - rule.near + 1) * size).clamp(min=0)
        end = torch.minimum(top, (high // size + rule.near) * size - 1)
    elif clause == "first":
        end = top.clamp(max=rule.first * size - 1)
    elif clause == "last":
        begin = (((total - 1) // size + 1 - rule.last) * size).clamp(min=0)
    else:
        step, begin = rule.stride, low % rule.stride
    return Lists(clause, begin, (torch.div(end - begin, step, rounding_mode="floor") + 1).clamp(min=0), step)


def positions(lists: Lists, width: int, groups: Groups, rule: SparseRule, marks: Marks | None) -> tuple[Tensor, Tensor]:
    """(n width) positions of the lists, and which of them are keys that the document holds."""
    entries = lists.entries(width)
    there = torch.arange(width, device=entries.device) < lists.length[:, None]
    first, start, count = groups.first[:, None], groups.start[:, None], groups.count[:, None]
    if lists.clause == "marked":
        assert marks is not None
        j = marks.slots[entries.clamp(max=max(len(marks.slots) - 1, 0))] - first + start if len(marks.slots) else entries
    elif lists.clause == "summary":
        j = torch.div(entries, rule.summary, rounding_mode="floor") * rule.block + rule.block - rule.summary
        j = j + entries % rule.summary
    else:
        j = entries
    return j, there & (j >= start) & (j < start + count)
