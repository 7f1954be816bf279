"""Timing: rounds in which all subjects take turns in random order, with cold and with warm caches, and the machine's limits."""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from hybridtf.bench.caches import Flush
from hybridtf.core import ConfigError
from hybridtf.cost.phases import Step

Clock: TypeAlias = Callable[[], float]
"""Seconds from any start, as ``time.perf_counter`` gives them."""

ROUND_SECONDS = 0.05
"""A round holds as many turns as make the slowest subject run so long: single short runs are mostly noise."""

MAX_TURNS = 64

EVENT_RESOLUTION = 0.5e-6
"""Seconds, of a CUDA event (CUDA runtime API, cudaEventElapsedTime)."""


@dataclass
class Timed:
    """Seconds of one step. ``cold`` (rounds): with caches that other data fills. ``warm`` (rounds, turns): right after
    another run of the step."""

    cold: list[float] = field(default_factory=list)
    warm: list[list[float]] = field(default_factory=list)

    @property
    def times(self) -> list[float]:
        """The median of each round's warm runs."""
        return [statistics.median(turns) for turns in self.warm]

    @property
    def total(self) -> float:
        """All warm seconds."""
        return math.fsum(seconds for turns in self.warm for seconds in turns)

    @property
    def runs(self) -> int:
        """How many warm runs there were."""
        return sum(map(len, self.warm))


def time_rounds(
    steps: Sequence[Step], *, rounds: int, warmup: int, clock: Clock = time.perf_counter,
    device: torch.device | str = "cpu", round_s: float = ROUND_SECONDS, seed: int = 0, flush: Flush | None = None,
    progress: Callable[[], None] | None = None,
) -> list[Timed]:
    """Seconds of each step in ``rounds`` rounds, after ``warmup`` runs of each that do not count.

    A round has the same number of turns for all; in a turn each step is run twice and the second run is timed as warm. In a
    round's first turn ``flush`` (None: nothing) comes before the first of the two, which is timed as cold. The order is drawn
    anew for each turn, so that what else the machine does falls on all alike. A step may stand in the list twice (a control).
    On a CUDA device the default clock gives way to device events; any other is read once the device has finished.
    Raises :class:`ConfigError` for no rounds. """
    if rounds < 1 or warmup < 0:
        raise ConfigError(f"repeats must be at least 1 and warmup at least 0, got {rounds} and {warmup}")
    device = torch.device(device)
    slowest = 0.0
    for _ in range(warmup):
        slowest = 0.0
        for step in steps:
            step.prepare()
            slowest = max(slowest, seconds_of(step, clock, device))
    turns = min(max(math.ceil(round_s / slowest), 1), MAX_TURNS) if slowest > 0 else 1
    order, shuffled = list(range(len(steps))), random.Random(seed)
    found = [Timed([], [[] for _ in range(rounds)]) for _ in steps]
    for turn in range(rounds * turns):
        shuffled.shuffle(order)
        for i in order:
            steps[i].prepare()
            if turn % turns == 0 and flush is not None:
                flush()
            first = seconds_of(steps[i], clock, device)
            if turn % turns == 0:
                found[i].cold.append(first)
            steps[i].prepare()
            found[i].warm[turn // turns].append(seconds_of(steps[i], clock, device))
            if progress is not None:
                progress()
    return found


def seconds_of(step: Step, clock: Clock, device: torch.device) -> float:
    """One run, the device's work included."""
    if device.type != "cuda":
        start = clock()
        step.run()
        return clock() - start
    torch.cuda.synchronize(device)
    if clock is time.perf_counter:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step.run()
        end.record()
        torch.cuda.synchronize(device)
        return float(begin.elapsed_time(end)) / 1e3
    start = clock()
    step.run()
    torch.cuda.synchronize(device)
    return clock() - start


def resolution_of(clock: Clock, device: torch.device) -> float:
    """The least seconds that the clock of :func:`seconds_of` tells apart, reading it included; 0 for one that stands still."""
    if device.type == "cuda" and clock is time.perf_counter:
        return EVENT_RESOLUTION
    reads = [clock() for _ in range(200)]
    return min((b - a for a, b in itertools.pairwise(reads) if b > a), default=0.0)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and third quartile, by linear interpolation; of one value, that value twice."""
    if len(values) == 1:
        return values[0], values[0]
    cuts = statistics.quantiles(values, n=4, method="inclusive")
    return cuts[0], cuts[2]


def tokens_per_second(tokens: int, total: float, runs: int) -> float:
    """All tokens over all time; a mean of rates would give fast runs more weight than they took."""
    return tokens * runs / total


# -- the machine's own limits --------------------------------------------------------------------------------------


def machine_floor(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, *, size: int = 1024,
    copy_bytes: int = 1 << 26,
) -> dict[str, float]:
    """What this machine reaches with the present number of threads, measured once a process.

    ``matrix_flops_per_s``: the best of a few ``size`` x ``size`` matrix products, 2 size^3 operations each.
    ``copy_bytes_per_s``: bytes read plus bytes written by the best of a few copies of ``copy_bytes`` bytes.
    """
    return dict(_floor(torch.device(device), dtype, size, copy_bytes, torch.get_num_threads()))


@functools.cache
def _floor(device: torch.device, dtype: torch.dtype, size: int, copy_bytes: int, threads: int) -> dict[str, float]:
    a, b, c = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(3))
    source = torch.ones(max(copy_bytes // dtype.itemsize, 1), device=device, dtype=dtype)
    target = torch.ones_like(source)
    with torch.no_grad():
        matrix = _best(lambda: torch.mm(a, b, out=c), device)
        copy = _best(lambda: target.copy_(source), device)
    return {
        "matrix_flops_per_s": 2 * size**3 / matrix,
        "copy_bytes_per_s": 2 * source.numel() * dtype.itemsize / copy,
    }


class Work(Step):
    """A function as a step."""

    def __init__(self, fn: Callable[[], object]) -> None:
        self.fn = fn

    def run(self) -> None:
        self.fn()


def _best(fn: Callable[[], object], device: torch.device) -> float:
    return min([seconds_of(Work(fn), time.perf_counter, device) for _ in range(7)][2:])
