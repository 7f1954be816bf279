"""Memory in three numbers: what the plan says of weights, gradients, optimizer and state, checked against what lives; the
activations, over a peak that was reset when the phase began; and the rest, what allocator, driver and process hold beyond.

On the CPU live tensors are counted, on real tensors or, to predict, on shapes without memory: the same code and the
same bytes, as the tests check. On a GPU the peak is the allocator's own. """

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch

from hybridtf.bench.child import run_trial
from hybridtf.bench.leaks import REPEATS, Leak, repeat_and_count
from hybridtf.bench.peak import AllocatorPeak
from hybridtf.bench.records import Record, make_record
from hybridtf.bench.subject import Identity, Subject
from hybridtf.core import ConfigError, leaves, state_bytes
from hybridtf.cost.calls import device_of
from hybridtf.cost.footprint import Footprint, Predictor, count_step, predict_bytes, state_memory
from hybridtf.cost.live_bytes import LiveBytes, storage_bytes
from hybridtf.cost.longest import longest_length
from hybridtf.cost.phases import DecodeStep, Phase, Step, TrainStep, make_step

CHECKED = ("weights", "gradients", "optimizer", "state")
"""The kinds of bytes that the plan computes and the measurement checks."""

PLANNED_TRAIN = 128
"""Tokens a row of the training step that is planned to check against."""

HOW = {
    "weights": "parameters and buffers, counted once each",
    "gradients": "counted after the backward pass",
    "optimizer": "what the optimizer (AdamW, or Muon beside it) keeps between steps",
    "activations": "train: what the forward pass leaves for the backward; else what lives at the peak beside the rest",
    "state": "allocated by the state after the phase",
    "state_used": "of the state's bytes, those that hold tokens: lengths and free room are not",
    "computed": "the same kinds, from shapes without memory",
    "leak": "live bytes after further runs of the same step, cycles collected",
}
"""How each kind of byte was found; written into the records."""

COUNTED = "live tensors counted at every operator of one run, from a peak reset at its start (warm-up is left out)"
ALLOCATOR = "torch.cuda.max_memory_allocated over one run, reset at its start, less what was allocated before the model"
RESIDENT = "a fresh process: highest resident size of one run (reset at its start), less that before the model was built"
NOT_ASKED = "not asked for: it takes a fresh process"


@dataclass
class Counted:
    """A footprint with what belongs to it: ``used`` bytes of the state, the leak, and the rest (a GPU's)."""

    footprint: Footprint
    leak: Leak
    used: int | None = None
    rest: dict[str, Any] | None = None


def measure_memory(
    subject: Subject, *, phase: Phase = "train", batch_size: int = 1, length: int = 1024,
    limit_bytes: int | None = None, max_length: int = 1 << 20, rest: bool = False, timeout_s: float = 600.0,
) -> Record:
    """A ``memory`` record. With ``limit_bytes``, ``longest`` is the most tokens a row whose predicted peak stays within it
    (:func:`~hybridtf.bench.fits.measure_fits` tries instead). ``rest``: on a CPU, also run the phase in a fresh process,
    to learn what it holds beyond the counted; on a GPU the rest is always there.

    Nothing depends on what was measured before: everything is built afresh, and the peak begins with it.
    """
    device, dtype, identity = _probe(subject)
    on_cuda = device.type == "cuda"
    found = _gpu_counted(subject, phase, batch_size, length) if on_cuda else counted(subject, phase, batch_size, length)
    notes = [] if found else [f"out of memory: {phase} at {batch_size} x {length} tokens does not fit the device"]
    longest = None
    if limit_bytes is not None:
        longest = predict_longest(
            subject, phase=phase, batch_size=batch_size, limit_bytes=limit_bytes, max_length=max_length
        )
    fields: dict[str, Any] = {"phase": phase, "batch_size": batch_size, "length": length, "device": str(device)}
    fields |= {"dtype": dtype, "result": "ok" if found else "out_of_memory"}
    how = {**HOW, "peak": ALLOCATOR if on_cuda else COUNTED}
    fields |= vars(found.footprint) if found else dict.fromkeys(vars(Footprint(0)))
    fields |= _against_plan(subject, phase, batch_size, length, found, notes)
    fields |= _state_fields(found)
    fields["rest"], how["rest"] = found.rest if found else None, "see torch.cuda.memory_stats and mem_get_info"
    if found and not on_cuda:
        fields["rest"], how["rest"] = _resident_rest(subject, phase, batch_size, length, found, timeout_s) if rest else (
            None, NOT_ASKED
        )
    fields["leak"] = found.leak.to_dict() if found else None
    if found and found.leak.bytes:
        notes.append(f"the step leaks: {found.leak.bytes} bytes more after {len(found.leak.live)} runs")
    return make_record("memory", identity, {**fields, "longest": longest, "how": how, "note": "; ".join(notes) or None})


def _probe(subject: Subject) -> tuple[torch.device, str, Identity]:
    """Device, dtype and identity, from a model that is let go again."""
    model = subject.build()
    return device_of(model), subject.dtype_of(model), subject.identity(model)


# -- first number: computed, and checked -------------------------------------------------------------------------------


def _against_plan(
    subject: Subject, phase: Phase, batch_size: int, length: int, found: Counted | None, notes: list[str]
) -> dict[str, Any]:
    """``computed`` bytes by kind, and ``differs``: for each kind where they are not those that live, both ([computed,
    counted]; empty: exact). Both None for a model that cannot be planned; a note says why."""
    # None of these bytes of a training step depend on its length, and a short one is traced much sooner.
    planned_length = min(length, PLANNED_TRAIN) if phase == "train" else length
    try:
        plan = vars(predict_bytes(subject, phase, batch_size, planned_length))
    except ConfigError as error:
        notes.append(f"nothing computed to check against: {error}")
        return {"computed": None, "differs": None}
    computed = {kind: plan[kind] for kind in CHECKED}
    if found is None:
        return {"computed": computed, "differs": None}
    live = vars(found.footprint)
    differs = {kind: [size, live[kind]] for kind, size in computed.items() if size != live[kind]}
    notes += [f"{kind}: {a} bytes computed, {b} counted" for kind, (a, b) in differs.items()]
    return {"computed": computed, "differs": differs}


def _state_fields(found: Counted | None) -> dict[str, Any]:
    """``state_used`` (logical bytes, against the held ones of ``state``) and ``state_ratio``, held / used."""
    used = found.used if found else None
    return {"state_used": used, "state_ratio": found.footprint.state / used if found and used else None}


def used_bytes(state: Any) -> int | None:
    """Bytes of a state that hold tokens; None where it has leaves that do not say."""
    return state_bytes(state, used=True) if leaves(state) else None


# -- third number: the rest --------------------------------------------------------------------------------------------


def _resident_rest(
    subject: Subject, phase: Phase, batch_size: int, length: int, found: Counted, timeout_s: float
) -> tuple[dict[str, Any] | None, str]:
    """``resident`` bytes beyond the bare process, and those ``beyond_counted``; None, and why, where they are not known."""
    said = run_trial(subject, phase, batch_size, length, None, timeout_s)
    if said["outcome"] != "fits":
        return None, f"the fresh process {said['outcome'].replace('_', ' ')}: {said['error']}"
    if said.get("peak") is None:
        return None, "this system lets no process reset its highest resident size: a peak that was not reset is refused"
    return {"resident": said["peak"], "beyond_counted": said["peak"] - found.footprint.peak}, RESIDENT


# -- the longest length, predicted -------------------------------------------------------------------------------------


def predict_longest(
    subject: Subject, *, phase: Phase, batch_size: int, limit_bytes: int, max_length: int
) -> dict[str, Any]:
    """``limit_bytes``, ``length`` (None: not even one token fits), ``phase``, whether ``max_length`` ended the search, and
    ``predicted``: that it is no trial.

    A search by trial inside this process is refused: a failed trial leaves fragments that shorten the next.
    """
    predictor = Predictor(subject, phase)
    found = longest_length(lambda n: predictor.at(n, batch_size).peak, limit_bytes, max_length)
    return {
        "limit_bytes": limit_bytes, "length": found or None, "phase": phase, "batch_size": batch_size,
        "at_least": found == max_length, "predicted": True,
    }


# -- by counting -------------------------------------------------------------------------------------------------------


def count_bytes(subject: Subject, phase: Phase, batch_size: int, length: int) -> Footprint:
    """The footprint of a phase on real tensors of the CPU."""
    gc.collect()
    with LiveBytes() as live:
        step = make_step(phase, subject, subject.build(), batch_size, length)
        step.prepare()
        step.run()
        return count_step(live, step)


def counted(subject: Subject, phase: Phase, batch_size: int, length: int) -> Counted:
    """:func:`count_bytes` after runs that look for a leak, with the bytes of the state that are used."""
    gc.collect()
    with LiveBytes() as live:
        step = make_step(phase, subject, subject.build(), batch_size, length)
        leak = repeat_and_count(step, REPEATS, lambda: live.now)
        return Counted(count_step(live, step), leak, used_bytes(getattr(step, "state", None)))


# -- by the allocator of a GPU -----------------------------------------------------------------------------------------


def on_gpu(subject: Subject, phase: Phase, batch_size: int, length: int) -> Counted:
    """The footprint of a phase on a CUDA device; raises ``torch.OutOfMemoryError`` where it does not fit."""
    gc.collect()
    torch.cuda.empty_cache()
    peak = AllocatorPeak()
    model = subject.build()
    found = Footprint(storage_bytes([*model.parameters(), *model.buffers()]))
    step = make_step(phase, subject, model, batch_size, length)
    leak = repeat_and_count(step, REPEATS, torch.cuda.memory_allocated)
    if isinstance(step, TrainStep):
        _allocated_in_training(step, found, peak)
    else:
        _allocated_in_reading(step, found, peak)
    rest = peak.rest()
    found.reserved, found.peak = rest["reserved"], peak.allocated()
    if phase != "train":
        found.activations = found.peak - found.weights - found.state
    return Counted(found, leak, used_bytes(getattr(step, "state", None)), rest)


def _allocated_in_reading(step: Step, found: Footprint, peak: AllocatorPeak) -> None:
    step.prepare()
    if isinstance(step, DecodeStep):
        step.forget_start()
    peak.reset()
    step.run()
    found.state = state_memory(getattr(step, "state", None))


def _allocated_in_training(step: TrainStep, found: Footprint, peak: AllocatorPeak) -> None:
    start = torch.cuda.memory_allocated()

    def after_forward() -> None:
        found.activations = torch.cuda.memory_allocated() - start

    def after_backward() -> None:
        found.gradients = storage_bytes(p.grad for p in step.model.parameters() if p.grad is not None)

    step.after_forward, step.after_backward = after_forward, after_backward
    peak.reset()
    step.run()
    found.optimizer = storage_bytes(step.optimizer_tensors())


def _gpu_counted(subject: Subject, phase: Phase, batch_size: int, length: int) -> Counted | None:
    """None: out of memory. What the failed attempt held is given back."""
    try:
        return on_gpu(subject, phase, batch_size, length)
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()
