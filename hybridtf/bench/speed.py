"""Speed: tokens a second in training, prefill and decode, against the machine's limits and beside other models."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from hybridtf.bench import noise
from hybridtf.bench.caches import Flush
from hybridtf.bench.gpu_state import gpu_state, refusals
from hybridtf.bench.kernel_calls import watching
from hybridtf.bench.kernel_checks import Check, check_calls, to_records
from hybridtf.bench.records import Record, make_record
from hybridtf.bench.subject import Subject
from hybridtf.bench.threads import pinned, thread_facts
from hybridtf.bench.timing import (
    ROUND_SECONDS,
    Clock,
    Timed,
    machine_floor,
    quartiles,
    resolution_of,
    time_rounds,
    tokens_per_second,
)
from hybridtf.bench.utilization import utilization
from hybridtf.core import ConfigError
from hybridtf.cost.calls import device_of
from hybridtf.cost.flops import CountWork
from hybridtf.cost.phases import PHASES, Phase, Step, make_step

RESOLUTIONS = 20
"""A run that is shorter than so many steps of the clock is not claimed."""


@dataclass
class _Part:
    """One subject in one phase. ``note``: why it is not timed."""

    subject: Subject
    model: nn.Module
    step: Step
    checks: list[Check]
    flops: int | None = None
    unknown: tuple[str, ...] = ()
    note: str | None = None
    timed: Timed | None = None


def measure_speed(
    subject: Subject, *, phases: Sequence[Phase] = PHASES, batch_size: int = 1, length: int = 1024, repeats: int = 20,
    warmup: int = 2, against: Sequence[Subject] = (), clock: Clock = time.perf_counter, floor: bool = True,
    threads: int | None = None, round_s: float = ROUND_SECONDS, progress: Callable[[], None] | None = None,
) -> list[Record]:
    """A ``speed`` record for each phase and each subject, all timed in the same ``repeats`` rounds, the first one twice
    (the control: see :mod:`hybridtf.bench.noise`).

    ``length``: tokens a row in ``train`` and ``prefill``, and the prompt before ``decode``. Warm-up runs do not count.
    ``threads``: compute with so many, tied to as many cores; None: as it is. ``round_s``: see :func:`time_rounds`.
    ``floor``: also measure what the machine reaches, once a process. A model whose kernels are wrong, or that does not
    fit, gets a record without a speed. Raises :class:`ConfigError` for sizes that are no work, a phase that a model cannot
    run, or a compiled model beside one that is not. """
    subjects = [subject, *against]
    doubled = {s.name for s in subjects if [o.name for o in subjects].count(s.name) > 1}
    if doubled:
        raise ConfigError(f"two subjects are called {min(doubled)!r}; give them names of their own")
    records = []
    with pinned(threads):
        models = [s.build() for s in subjects]
        _same_backend(subjects, models)
        device = device_of(models[0])
        common: dict[str, Any] = {
            "batch_size": batch_size, "length": length, "warmup": warmup, **thread_facts(), "device": str(device),
            "floor": machine_floor(device) if floor else None, "compiled": is_compiled(models[0]),
        }
        for phase in phases:
            parts = [_part(phase, s, m, batch_size, length) for s, m in zip(subjects, models, strict=True)]
            shared = _time(parts, device, clock, progress, rounds=repeats, warmup=warmup, round_s=round_s)
            records += [_record(part, parts[0], {"phase": phase, **common}, shared) for part in parts]
    return records


def is_compiled(model: nn.Module) -> bool:
    """By ``torch.compile`` or ``Module.compile``, as a whole or in parts."""
    return any(
        isinstance(m, torch._dynamo.OptimizedModule) or getattr(m, "_compiled_call_impl", None) is not None
        for m in model.modules()
    )


def _same_backend(subjects: Sequence[Subject], models: Sequence[nn.Module]) -> None:
    found = {s.name: is_compiled(m) for s, m in zip(subjects, models, strict=True)}
    if len(set(found.values())) > 1:
        yes, no = (", ".join(name for name, value in found.items() if value is wanted) for wanted in (True, False))
        raise ConfigError(f"{yes} is compiled, {no} is not: that compares the compiler; compile all of them or none")


def _part(phase: Phase, subject: Subject, model: nn.Module, batch_size: int, length: int) -> _Part:
    """One run counts the operations and shows the kernels' calls, which are checked."""
    part = _Part(subject, model, make_step(phase, subject, model, batch_size, length), [])
    counter = CountWork()
    try:
        part.step.prepare()
        with torch.compiler.set_stance("force_eager"), watching(model) as calls, counter:
            part.step.run()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        part.note = "out of memory"
        return part
    part.unknown = tuple(sorted(set().union(*(work.unknown for work in counter.parts.values()))))
    part.flops = None if part.unknown else sum(work.flops for work in counter.parts.values())
    part.checks = check_calls(calls, device_of(model), subject.autocast)
    wrong = next((check for check in part.checks if check.why is not None), None)
    part.note = None if wrong is None else wrong.words
    return part


def _time(
    parts: Sequence[_Part], device: torch.device, clock: Clock, progress: Callable[[], None] | None, **how: Any
) -> dict[str, Any]:
    """Fills ``timed`` of all that can be timed. Returns what their records share: ``control`` and the fields on how."""
    flush, before, load = Flush(device), gpu_state(device), _load()
    fitting = [part for part in parts if part.note is None]
    steps = [part.step for part in fitting]
    timed = time_rounds([*steps[:1], *steps], clock=clock, device=device, flush=flush, progress=progress, **how)
    for part, its in zip(fitting, timed[1:], strict=True):
        part.timed = its
    control = noise.control_of(timed[1].times, timed[0].times) if fitting else None
    after = gpu_state(device)
    name = "device events" if device.type == "cuda" and clock is time.perf_counter else getattr(clock, "__name__", "clock")
    resolution = resolution_of(clock, device)
    return {
        "compared": len(parts) > 1, "control": control, "refused": refusals(before, after), "resolution": resolution,
        "fields": {
            "clock": {"name": name, "resolution_s": resolution}, "cache": flush.to_dict(),
            "gpu": None if before is None else {"before": before, "after": after},
            "noise": None if control is None else {**control.to_dict(), "of": fitting[0].subject.name, "load": [load, _load()]},
        },
    }


def _load() -> float | None:
    """Processes that want to run, over the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _record(part: _Part, first: _Part, common: dict[str, Any], shared: dict[str, Any]) -> Record:
    fields = speed_fields(part.step.tokens, part.timed, part.flops, shared["resolution"])
    fields["refused"] += shared["refused"]
    device = device_of(part.model)
    dtype = part.subject.dtype_of(part.model)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    ratio = None
    if shared["compared"] and part.timed is not None and first.timed is not None:
        ratio = ratio_fields(part, first, shared["control"], [*shared["refused"], *_short(part, first, shared["resolution"])])
    notes = [part.note, f"no formula for the operations of {', '.join(part.unknown)}" if part.unknown else None]
    return make_record("speed", part.subject.identity(part.model), {
        **common, "dtype": dtype, **fields, **shared["fields"], "ratio": ratio,
        "mfu": utilization(fields["flops_per_s"], dtype, device, gpu),
        "checks": to_records(part.checks), "note": "; ".join(filter(None, notes)) or None,
    })


def speed_fields(tokens: int, timed: Timed | None, flops: int | None = None, resolution: float = 0.0) -> dict[str, Any]:
    """What the seconds of equal runs of ``tokens`` tokens say; None: it was not timed.

    The figures are of warm caches, ``cold`` has those of cold ones. ``refused``: why they are no claim. Raises
    :class:`ConfigError` for warm times without cold ones. """
    if timed is None:
        names = ("tokens_per_s", "median_s", "p20_s", "p80_s", "spread_s", "drift", "flops", "flops_per_s", "cold")
        return {"tokens": tokens, **dict.fromkeys(names), "times": [], "turns": 0, "refused": []}
    if len(timed.cold) != len(timed.warm) or not timed.cold:
        raise ConfigError("a speed with warm caches is given only beside the one with cold caches")
    times = timed.times
    low, high = quartiles(times)
    rate = tokens_per_second(tokens, timed.total, timed.runs)
    return {
        "tokens": tokens, "tokens_per_s": rate, **_quantiles(times), "spread_s": high - low, "times": times,
        "turns": len(timed.warm[0]), "drift": noise.drift_of(times), "cold": {**_quantiles(timed.cold), "times": timed.cold},
        "flops": flops, "flops_per_s": None if not flops else flops * rate / tokens,
        "refused": _unsure(times, resolution),
    }


def _quantiles(times: Sequence[float]) -> dict[str, float]:
    low, middle, high = np.quantile(times, [0.2, 0.5, 0.8])
    return {"median_s": float(middle), "p20_s": float(low), "p80_s": float(high)}


def _unsure(times: Sequence[float], resolution: float) -> list[str]:
    reasons = []
    if len(times) < noise.MIN_ROUNDS:
        reasons.append(f"{len(times)} rounds are too few: at least {noise.MIN_ROUNDS} are needed")
    spread = noise.relative_spread(times)
    if spread > noise.MAX_SPREAD:
        reasons.append(
            f"times differ by {100 * spread:.1f} % between the quartiles; at most {100 * noise.MAX_SPREAD:g} % are a claim"
        )
    return [*reasons, *too_short(times, resolution)]


def too_short(times: Sequence[float], resolution: float) -> list[str]:
    if statistics.median(times) >= RESOLUTIONS * resolution:
        return []
    return [f"a run is shorter than {RESOLUTIONS} steps of the clock, of {resolution:.1e} s each"]


def _short(part: _Part, first: _Part, resolution: float) -> list[str]:
    return next(
        (found for one in (part, first) if one.timed is not None and (found := too_short(one.timed.times, resolution))), []
    )


def ratio_fields(
    part: _Part, first: _Part, control: noise.Control, refused: Sequence[str]
) -> dict[str, Any]:
    """How many times as long a run takes as one of the first subject (of that one itself: the control), with the interval at
    :data:`noise.LEVEL`; a ``verdict`` only where the noise bears it, "~" otherwise."""
    assert part.timed is not None
    assert first.timed is not None
    ratio = control.ratio if part is first else noise.ratio_of(part.timed.times, first.timed.times)
    verdict, reasons = ("~", control.reasons) if part is first else noise.verdict_of(ratio, control, refused)
    return {
        "against": first.subject.name, "time": ratio.time, "interval": noise.ends(ratio), "level": noise.LEVEL,
        "verdict": verdict, "refused": list(reasons),
    }
