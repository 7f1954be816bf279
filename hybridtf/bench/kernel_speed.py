"""Speed of the kernels of one op, on a call that a model really makes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybridtf.bench.beside import Beside, ratio_fields, time_beside, time_fields
from hybridtf.bench.kernel_calls import Call, tensors, watching
from hybridtf.bench.kernel_checks import Check, arguments_of, check_call, to_records
from hybridtf.bench.records import Record, make_record
from hybridtf.bench.subject import Subject, kernels_by_op
from hybridtf.bench.threads import pinned, thread_facts
from hybridtf.bench.timing import ROUND_SECONDS, Clock
from hybridtf.core import KernelError, UnknownNameError, active, known_names
from hybridtf.cost.calls import device_of
from hybridtf.cost.phases import Phase, Step, make_step


class _KernelStep(Step):
    """One call, and in training its backward. A run takes no tokens of a model: it is the op alone."""

    def __init__(self, call: Call, device: torch.device, autocast: torch.dtype | None) -> None:
        self.call, self.device, self.autocast = call, device, autocast
        with torch.set_grad_enabled(call.phase == "train"):
            self.arguments = arguments_of(call, device)
        self.slopes: list[Tensor] | None = None

    def run(self) -> None:
        learns = self.call.phase == "train"
        cast = torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None)
        with torch.set_grad_enabled(learns), cast:
            out = [x for x in tensors(self.call.call(self.call.function, self.arguments)) if x.requires_grad or not learns]
        if learns and out:
            self.slopes = [torch.ones_like(x) for x in out] if self.slopes is None else self.slopes
            torch.autograd.grad(out, tensors(self.arguments), self.slopes, allow_unused=True)


@dataclass(kw_only=True)
class _Kernel(Beside):
    call: Call
    check: Check


def measure_kernels(
    subject: Subject, op: str, *, kernels: Sequence[str] = (), phase: Phase = "train", batch_size: int = 1,
    length: int = 1024, repeats: int = 20, warmup: int = 2, threads: int | None = None, round_s: float = ROUND_SECONDS,
    clock: Clock = time.perf_counter, progress: Callable[[], None] | None = None,
) -> list[Record]:
    """A ``kernel`` record for each of ``kernels`` (none: all that can make the call), timed beside each other on the largest
    call of ``op`` that the model makes in ``phase``; the first is the one that the others are compared with, the model's own
    unless ``kernels`` says. In training the backward belongs to it.

    A wrong kernel gets no speed. Raises :class:`UnknownNameError` for an op that the model has not or an unknown kernel, and
    :class:`KernelError` for one that was asked for and cannot make the call. """
    with pinned(threads):
        model = subject.build()
        device = device_of(model)
        step = make_step(phase, subject, model, batch_size, length)
        step.prepare()
        with watching(model, op) as calls:
            step.run()
        calls = [call for call in calls if call.phase == phase]
        if not calls:
            has = kernels_by_op(model)
            raise UnknownNameError(f"{subject.name} does not call an op {op!r} in {phase}. {known_names(op, has)}")
        call = max(calls, key=lambda call: sum(x.numel() for x in tensors(call.arguments)))
        parts = [_part(call, name, device, subject.autocast) for name in _names(call, kernels)]
        shared = time_beside(parts, device, clock, progress, rounds=repeats, warmup=warmup, round_s=round_s)
        common: dict[str, Any] = {
            "op": op, "phase": phase, "batch_size": batch_size, "length": length, "shapes": call.shapes, "warmup": warmup,
            **thread_facts(), "device": str(device), "dtype": str(call.dtype).removeprefix("torch."),
        }
        identity = subject.identity(model)
        return [
            make_record("kernel", identity, {
                **common, "kernel": part.name, **time_fields(part.timed, shared.resolution), **shared.fields,
                "ratio": ratio_fields(part, parts[0], shared), "checks": to_records([part.check]), "note": part.note,
            })
            for part in parts
        ]


def _names(call: Call, asked: Sequence[str]) -> list[str]:
    reasons = active().kernels.reasons(call.request)
    for name in asked:
        if name not in reasons:
            raise UnknownNameError(f"op {call.op!r} has no kernel named {name!r}. {known_names(name, reasons)}")
        if reasons[name] is not None:
            raise KernelError(f"{call.op}: kernel {name!r} cannot run for {call.phase} here ({reasons[name]})")
    if asked:
        return list(dict.fromkeys(asked))
    return [call.kernel, *(name for name, reason in reasons.items() if reason is None and name != call.kernel)]


def _part(call: Call, name: str, device: torch.device, autocast: torch.dtype | None) -> _Kernel:
    own = replace(call, kernel=name, function=active().kernels.get(call.op, name).load())
    check = check_call(own, device, autocast)
    note = None if check.why is None else check.words
    return _Kernel(name=name, step=_KernelStep(own, device, autocast), note=note, call=own, check=check)
