"""Leaks: what a step leaves behind, repeat after repeat, although nothing it needs has grown."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hybridtf.core import ConfigError
from hybridtf.cost.calls import device_of
from hybridtf.cost.live_bytes import LiveBytes
from hybridtf.cost.phases import Step

WARM_UP = 2
"""Runs before the first count: in them optimizers make their state and positions their tables."""

REPEATS = 3
"""Counts that every memory measurement makes."""


@dataclass(frozen=True)
class Leak:
    """``live``: bytes of live tensors after each repeat, warm-up left out."""

    live: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """What the last repeat left behind that the first one had not; 0 where nothing leaks."""
        return max(self.live[-1] - self.live[0], 0)

    @property
    def per_repeat(self) -> int:
        """The middle of the growths from repeat to repeat; 0 with :attr:`bytes` above 0 means that not every one leaks."""
        return int(statistics.median([after - before for before, after in zip(self.live, self.live[1:], strict=False)]))

    def to_dict(self) -> dict[str, Any]:
        """As records hold it."""
        return {"repeats": len(self.live), "bytes": self.bytes, "per_repeat": self.per_repeat}


def find_leak(step: Step, repeats: int = 20, *, warm_up: int = WARM_UP) -> Leak:
    """Run ``step`` again and again, and count the live bytes after each repeat: counted tensors on a CPU, what the
    allocator says on a GPU.

    Counting is exact, so any growth is one. A step begins anew at each repeat (``prepare``): a state that grows within a
    repeat is no leak. Raises :class:`ConfigError` for fewer than 2 repeats.
    """
    if device_of(step.model).type == "cuda":
        return repeat_and_count(step, repeats, torch.cuda.memory_allocated, warm_up)
    with LiveBytes() as live:
        return repeat_and_count(step, repeats, lambda: live.now, warm_up)


def repeat_and_count(step: Step, repeats: int, live_bytes: Callable[[], int], warm_up: int = WARM_UP) -> Leak:
    """:func:`find_leak` with another count of live bytes. Cycles are collected before each, as they would be in time."""
    if repeats < 2:
        raise ConfigError(f"repeats must be at least 2, got {repeats}")
    counts = []
    for turn in range(warm_up + repeats):
        step.prepare()
        step.run()
        gc.collect()
        if turn >= warm_up:
            counts.append(live_bytes())
    return Leak(tuple(counts))
