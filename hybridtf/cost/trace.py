"""Work and bytes of a phase at any length: traced on shapes, or carried on from shorter lengths where that is exact.

The work of a chunked form grows with its chunks, and so does the time of tracing it. Beyond :data:`TRACED` tokens four lengths
are traced that leave the same rest by :data:`PERIOD`, all longer than anything that the model's options count (windows,
blocks, chunks). Where a polynomial of degree two through three of them gives the fourth for every operator, to the operation,
it gives any later length. Where it gives what was asked of an operator, but not the tiles that it computes, what these are
more grows on as it did over the last three. Else the length itself is traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hybridtf.cost.flops import CountWork, Key, Work
from hybridtf.cost.footprint import Footprint, Predictor
from hybridtf.cost.phases import Phase, Planned
from hybridtf.cost.widths import HEADS, WIDTHS

TRACED = 2048
PERIOD = 512
LONGEST_BASE = 1 << 14

COUNTS_NO_TOKENS = WIDTHS | HEADS | {"d_state", "index_head_dim", "n_experts", "seed"}
"""Options of blocks that may be large and say nothing of where a row's work changes its form."""


@dataclass(frozen=True)
class Traced:
    """What a phase does: ``work`` by part (``forward``, ``backward``, ``update``), and ``footprint``.

    ``exact``: traced at this very length; else carried on: operations exactly but for masked pairs, the peak by its growth.
    """

    work: Mapping[str, Work]
    footprint: Footprint
    exact: bool


@dataclass
class Tracer:
    """Traces of one phase of one model, each made once. ``reach``: the largest number of tokens that an option counts."""

    planned: Planned
    phase: Phase
    reach: int = 0
    _seen: dict[tuple[int, int], Traced] = field(default_factory=dict)
    _predictor: Predictor | None = None

    def at(self, length: int, batch_size: int = 1) -> Traced:
        """The phase at ``length`` tokens a row."""
        if length <= TRACED or self.phase == "decode":
            return self._trace(length, batch_size)
        found = self._carried_on(length, batch_size)
        return self._trace(length, batch_size) if found is None else found

    def _trace(self, length: int, batch_size: int) -> Traced:
        key = (length, batch_size)
        if key not in self._seen:
            if self._predictor is None:
                self._predictor = Predictor(self.planned, self.phase)
            counter = CountWork()
            footprint = self._predictor.at(length, batch_size, counter)
            self._seen[key] = Traced(counter.parts, footprint, True)
        return self._seen[key]

    def _carried_on(self, length: int, batch_size: int) -> Traced | None:
        rest, least = length % PERIOD, max(self.reach, 1)
        first = -(-max(least - rest, 1) // PERIOD)
        bases = [rest + PERIOD * (first + i) for i in range(4)]
        if length <= bases[-1] or bases[-1] > LONGEST_BASE:
            return None
        traces = [self._trace(base, batch_size) for base in bases]
        step = (length - bases[0]) // PERIOD
        parts: dict[str, Work] = {}
        for part in traces[0].work:
            work = _work_at(step, [trace.work[part] for trace in traces])
            if work is None:
                return None
            parts[part] = work
        return Traced(parts, _footprint_at(step, [trace.footprint for trace in traces]), False)


def _work_at(step: int, seen: list[Work]) -> Work | None:
    """None: the operations are no polynomial of degree two."""
    found = Work(unknown=set().union(*(work.unknown for work in seen)))
    keys: set[Key] = set().union(*(work.by_op for work in seen))
    for key in keys:
        flops, moved = ([work.by_op.get(key, (0, 0))[i] for work in seen] for i in (0, 1))
        asked = [work.asked[key] for work in seen if key in work.asked]
        if len(asked) == len(seen) and polynomial(asked, 3) == asked[3]:
            found.asked[key] = polynomial(asked, step)
        if polynomial(flops, 3) == flops[3]:
            later = polynomial(flops, step)
        elif key in found.asked:
            more = [a - b for a, b in zip(flops, asked, strict=True)]
            later = found.asked[key] + max(more[3] + (step - 3) * (more[3] - more[1]) // 2, 0)
        else:
            return None
        found.by_op[key] = (later, polynomial(moved, step))
    return found


def _footprint_at(step: int, seen: list[Footprint]) -> Footprint:
    """Every kind of byte by the growth over the last lengths."""
    kinds: dict[str, Any] = {
        name: polynomial([vars(one)[name] for one in seen[1:]], step - 1) for name in vars(seen[0]) if name != "reserved"
    }
    return Footprint(**kinds)


def polynomial(values: list[int], step: int) -> int:
    """The polynomial of degree two through the first three ``values``, at steps 0, 1 and 2, at another step."""
    a, b, c = values[:3]
    return a + step * (b - a) + step * (step - 1) // 2 * (c - 2 * b + a)


def reach_of(config: Any) -> int:
    """The largest whole number among the options of a model's blocks that may count tokens (all but widths and heads): no
    window, block or chunk of it is longer."""
    numbers = [n for stack in config.stacks() for block in stack.blocks.values() for n in _numbers(block.to_dict())]
    return max(numbers, default=0)


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int) and not isinstance(value, bool | torch.SymInt):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in COUNTS_NO_TOKENS:
                yield from _numbers(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner)
