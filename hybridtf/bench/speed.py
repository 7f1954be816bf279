"""Speed: tokens a second in training, prefill and decode, against the machine's limits and beside other models."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hybridtf.bench.beside import Beside, Shared, ratio_fields, time_beside, time_fields
from hybridtf.bench.kernel_calls import is_compiled, watching
from hybridtf.bench.kernel_checks import Check, check_calls, to_records
from hybridtf.bench.records import Record, make_record
from hybridtf.bench.subject import Subject
from hybridtf.bench.threads import pinned, thread_facts
from hybridtf.bench.timing import ROUND_SECONDS, Clock, Timed, machine_floor, tokens_per_second
from hybridtf.bench.utilization import utilization
from hybridtf.core import ConfigError
from hybridtf.cost.calls import device_of
from hybridtf.cost.flops import CountWork
from hybridtf.cost.phases import PHASES, Phase, make_step


@dataclass(kw_only=True)
class _Part(Beside):
    """One subject in one phase."""

    subject: Subject
    model: nn.Module
    checks: list[Check] = field(default_factory=list)
    flops: int | None = None
    unknown: tuple[str, ...] = ()


def measure_speed(
    subject: Subject, *, phases: Sequence[Phase] = PHASES, batch_size: int = 1, length: int = 1024, repeats: int = 20,
    warmup: int = 2, against: Sequence[Subject] = (), clock: Clock = time.perf_counter, floor: bool = True,
    threads: int | None = None, round_s: float = ROUND_SECONDS, progress: Callable[[], None] | None = None,
) -> list[Record]:
    """A ``speed`` record for each phase and each subject, all timed in the same ``repeats`` rounds, the first one twice
    (the control: see :mod:`hybridtf.bench.noise`): one ``session``.

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
            "session": uuid.uuid4().hex[:16], "batch_size": batch_size, "length": length, "repeats": repeats,
            "warmup": warmup, **thread_facts(), "device": str(device),
            "floor": machine_floor(device) if floor else None, "compiled": is_compiled(models[0]),
        }
        for phase in phases:
            parts = [_part(phase, s, m, batch_size, length) for s, m in zip(subjects, models, strict=True)]
            shared = time_beside(parts, device, clock, progress, rounds=repeats, warmup=warmup, round_s=round_s)
            records += [_record(part, parts[0], {"phase": phase, **common}, shared) for part in parts]
    return records


def _same_backend(subjects: Sequence[Subject], models: Sequence[nn.Module]) -> None:
    found = {s.name: is_compiled(m) for s, m in zip(subjects, models, strict=True)}
    if len(set(found.values())) > 1:
        yes, no = (", ".join(name for name, value in found.items() if value is wanted) for wanted in (True, False))
        raise ConfigError(f"{yes} is compiled, {no} is not: that compares the compiler; compile all of them or none")


def _part(phase: Phase, subject: Subject, model: nn.Module, batch_size: int, length: int) -> _Part:
    """One run counts the operations and shows the kernels' calls, which are checked."""
    step = make_step(phase, subject, model, batch_size, length)
    part = _Part(name=subject.name, step=step, subject=subject, model=model)
    counter = CountWork()
    try:
        part.step.prepare()
        with watching(model) as calls, counter:
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


def _record(part: _Part, first: _Part, common: dict[str, Any], shared: Shared) -> Record:
    fields = speed_fields(part.step.tokens, part.timed, part.flops, shared.resolution)
    fields["refused"] += shared.refused
    device = device_of(part.model)
    dtype = part.subject.dtype_of(part.model)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    notes = [part.note, f"no formula for the operations of {', '.join(part.unknown)}" if part.unknown else None]
    return make_record("speed", part.subject.identity(part.model), {
        **common, "dtype": dtype, **fields, **shared.fields, "ratio": ratio_fields(part, first, shared),
        "mfu": utilization(fields["flops_per_s"], dtype, device, gpu),
        "checks": to_records(part.checks), "note": "; ".join(filter(None, notes)) or None,
    })


def speed_fields(tokens: int, timed: Timed | None, flops: int | None = None, resolution: float = 0.0) -> dict[str, Any]:
    """What the seconds of equal runs of ``tokens`` tokens say; None: it was not timed.

    The figures are of warm caches, ``cold`` has those of cold ones. ``refused``: why they are no claim. Raises
    :class:`ConfigError` for warm times without cold ones. """
    fields = time_fields(timed, resolution)
    if timed is None:
        return {"tokens": tokens, "tokens_per_s": None, **fields, "flops": None, "flops_per_s": None}
    rate = tokens_per_second(tokens, timed.total, timed.runs)
    return {
        "tokens": tokens, "tokens_per_s": rate, **fields, "flops": flops,
        "flops_per_s": None if not flops else flops * rate / tokens,
    }
