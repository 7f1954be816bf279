"""Speed: tokens a second in training, prefill and decode, against the machine's limits and beside other models."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hybridtf.bench.records import Record, make_record
from hybridtf.bench.subject import Subject
from hybridtf.bench.timing import Clock, machine_floor, quartiles, time_steps, tokens_per_second
from hybridtf.core import ConfigError
from hybridtf.cost.calls import device_of
from hybridtf.cost.flops import count_flops
from hybridtf.cost.phases import PHASES, Phase, Step, make_step


def measure_speed(
    subject: Subject, *, phases: Sequence[Phase] = PHASES, batch_size: int = 1, length: int = 1024, repeats: int = 5,
    warmup: int = 2, against: Sequence[Subject] = (), clock: Clock = time.perf_counter, floor: bool = True,
    progress: Callable[[], None] | None = None,
) -> list[Record]:
    """A ``speed`` record for each phase and each subject; with ``against``, all subjects take turns within the phase.

    ``length``: tokens a row in ``train`` and ``prefill``, and the prompt before ``decode``. Warm-up runs do not count.
    ``tokens_per_s`` is all tokens over all time, ``median_s`` and ``spread_s`` (between the quartiles) are of one run,
    and ``ratio`` compares with the first subject. ``floor``: also measure what the machine reaches, once a process.
    Raises :class:`ConfigError` for sizes that are no work or a phase that a model cannot run. """
    subjects = [subject, *against]
    doubled = {s.name for s in subjects if [o.name for o in subjects].count(s.name) > 1}
    if doubled:
        raise ConfigError(f"two subjects are called {min(doubled)!r}; give them names of their own")
    models = [s.build() for s in subjects]
    device = device_of(models[0])
    limits = machine_floor(device) if floor else None
    records = []
    for phase in phases:
        steps = [
            make_step(phase, s, model, batch_size, length) for model, s in zip(models, subjects, strict=True)
        ]
        flops = [_flops(step) for step in steps]
        fitting = [step for step, count in zip(steps, flops, strict=True) if count is not None]
        measured = iter(
            time_steps(fitting, repeats=repeats, warmup=warmup, clock=clock, device=device, progress=progress)
        )
        times = [[] if count is None else next(measured) for count in flops]
        common: dict[str, Any] = {
            "phase": phase, "batch_size": batch_size, "length": length, "warmup": warmup,
            "threads": torch.get_num_threads(), "device": str(device), "floor": limits,
        }
        for i, (one, model) in enumerate(zip(subjects, models, strict=True)):
            fields = speed_fields(steps[i].tokens, times[i], flops[i])
            common["dtype"] = one.dtype_of(model)
            ratio = None
            if against and times[i] and times[0]:
                ratio = {"against": subject.name, **ratio_fields(times[i], times[0])}
            records.append(make_record("speed", one.identity(model), {**common, **fields, "ratio": ratio}))
    return records


def speed_fields(tokens: int, times: Sequence[float], flops: int | None = None) -> dict[str, Any]:
    """What the seconds of equal runs of ``tokens`` tokens say; no runs: it did not fit into memory."""
    if not times:
        nothing = dict.fromkeys(("tokens_per_s", "median_s", "spread_s", "flops", "flops_per_s"))
        return {"tokens": tokens, **nothing, "times": [], "note": "out of memory"}
    low, high = quartiles(times)
    rate = tokens_per_second(tokens, times)
    return {
        "tokens": tokens, "tokens_per_s": rate, "median_s": statistics.median(times), "spread_s": high - low,
        "times": list(times), "flops": flops, "flops_per_s": None if not flops else flops * rate / tokens,
        "note": None,
    }


def ratio_fields(times: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """How much longer one takes than the other: ``time`` is the ratio of the medians, ``low`` and ``high`` the
    quartiles of the ratios within each turn, which share what else the machine did."""
    low, high = quartiles([a / b for a, b in zip(times, others, strict=True)])
    return {"time": statistics.median(times) / statistics.median(others), "low": low, "high": high}


def _flops(step: Step) -> int | None:
    """Operations of one run; None where it does not fit into the device's memory."""
    try:
        step.prepare()
        return count_flops(step.run)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None

