"""Deep stacks folded for drawing: what repeats is drawn once, with a count."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

FOLD_ABOVE = 12
"""Stacks of up to this many layers are drawn layer by layer."""

_LONGEST_GROUP = 64


@dataclass(frozen=True)
class Layer:
    """One drawn layer: its block, and its place in the stack (from 0; of the first repetition, where it repeats)."""

    block: str
    index: int


@dataclass(frozen=True)
class Group:
    """``parts``, which occur ``count`` times in a row."""

    parts: tuple[Node, ...]
    count: int


Node: TypeAlias = Layer | Group


def fold(layers: Sequence[str], start: int = 0) -> tuple[Node, ...]:
    """``layers`` with runs and repeated groups counted, such that as few layers as possible are drawn."""
    nodes: list[Node] = []
    at = 0
    for period, count in _plan(tuple(layers))[1]:
        if count == 1:
            nodes.append(Layer(layers[at], start + at))
        else:
            nodes.append(Group(fold(layers[at : at + period], start + at), count))
        at += period * count
    return tuple(nodes)


def arrange(layers: Sequence[str]) -> tuple[Node, ...]:
    """What to draw: a short stack as it is, a deep one folded."""
    if len(layers) > FOLD_ABOVE:
        return fold(layers)
    return tuple(Layer(block, index) for index, block in enumerate(layers))


def drawn(nodes: Sequence[Node]) -> Iterator[Layer]:
    """The layers that are drawn, in order."""
    for node in nodes:
        if isinstance(node, Layer):
            yield node
        else:
            yield from drawn(node.parts)


def size(node: Node) -> int:
    """How many layers of the stack a node stands for."""
    return 1 if isinstance(node, Layer) else node.count * sum(map(size, node.parts))


def depth(nodes: Sequence[Node]) -> int:
    """How many brackets stand inside each other."""
    return max((1 + depth(node.parts) for node in nodes if isinstance(node, Group)), default=0)


@functools.lru_cache(maxsize=4096)
def _plan(layers: tuple[str, ...]) -> tuple[tuple[int, int], tuple[tuple[int, int], ...]]:
    """(layers drawn, brackets) of the best plan and its steps (period, count), found from the end backwards."""
    n = len(layers)
    best: list[tuple[tuple[int, int], tuple[tuple[int, int], ...]]] = [((0, 0), ())] * (n + 1)
    for at in reversed(range(n)):
        (drawn_after, brackets_after), steps = best[at + 1]
        best[at] = ((drawn_after + 1, brackets_after), ((1, 1), *steps))
        for period, count in _repetitions(layers, at):
            inner, _ = _plan(layers[at : at + period])
            (drawn_after, brackets_after), steps = best[at + period * count]
            cost = (inner[0] + drawn_after, inner[1] + 1 + brackets_after)
            if cost < best[at][0]:
                best[at] = (cost, ((period, count), *steps))
    return best[0]


def _repetitions(layers: tuple[str, ...], at: int) -> Iterator[tuple[int, int]]:
    """(period, count) of every group that repeats from ``at``, as often as it does."""
    for period in range(1, min(_LONGEST_GROUP, (len(layers) - at) // 2) + 1):
        unit, count = layers[at : at + period], 1
        while layers[at + count * period : at + (count + 1) * period] == unit:
            count += 1
        if count > 1:
            yield period, count
