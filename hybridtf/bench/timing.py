"""Timing: warm-up apart, several subjects in turn, raw times kept, totals over totals."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from hybridtf.core import ConfigError
from hybridtf.cost.phases import Step

Clock: TypeAlias = Callable[[], float]
"""Seconds from any start, as ``time.perf_counter`` gives them."""


def time_steps(
    steps: Sequence[Step], *, repeats: int, warmup: int, clock: Clock = time.perf_counter,
    device: torch.device | str = "cpu", progress: Callable[[], None] | None = None,
) -> list[list[float]]:
    """Seconds of ``repeats`` runs of each step, after ``warmup`` runs of each that do not count.

    The steps take turns (A B A B ...), so that what else the machine does falls on all alike. On a CUDA device the
    default clock gives way to device events; any other clock is read once the device has finished. """
    if repeats < 1 or warmup < 0:
        raise ConfigError(f"repeats must be at least 1 and warmup at least 0, got {repeats} and {warmup}")
    device = torch.device(device)
    times: list[list[float]] = [[] for _ in steps]
    for turn in range(warmup + repeats):
        for step, kept in zip(steps, times, strict=True):
            step.prepare()
            seconds = _timed(step, clock, device)
            if turn >= warmup:
                kept.append(seconds)
            if progress is not None:
                progress()
    return times


def _timed(step: Step, clock: Clock, device: torch.device) -> float:
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


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and third quartile, by linear interpolation; of one value, that value twice."""
    if len(values) == 1:
        return values[0], values[0]
    cuts = statistics.quantiles(values, n=4, method="inclusive")
    return cuts[0], cuts[2]


def tokens_per_second(tokens: int, times: Sequence[float]) -> float:
    """All tokens over all time; a mean of rates would give fast repeats more weight than they took."""
    total = sum(times)
    if total <= 0:
        raise ConfigError("the clock did not move during the measurement: measure more work, or with a finer clock")
    return tokens * len(times) / total


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


class _Call(Step):
    def __init__(self, fn: Callable[[], object]) -> None:
        self.fn = fn

    def run(self) -> None:
        self.fn()


def _best(fn: Callable[[], object], device: torch.device) -> float:
    return min(time_steps([_Call(fn)], repeats=5, warmup=2, device=device)[0])
