"""Memory by kind, its peak, and the longest length that fits under a limit.

On the CPU live tensors are counted, on real tensors or, to predict, on shapes without memory: the same code and the
same bytes, as the tests check. On a GPU the peak is the allocator's own. """

from __future__ import annotations

import gc
from typing import Any

import torch

from hybridtf.bench.records import Record, make_record
from hybridtf.bench.subject import Identity, Subject
from hybridtf.cost.calls import device_of
from hybridtf.cost.footprint import Footprint, Predictor, count_step, state_memory
from hybridtf.cost.live_bytes import LiveBytes, storage_bytes
from hybridtf.cost.longest import longest_length
from hybridtf.cost.phases import DecodeStep, Phase, TrainStep, make_step

HOW = {
    "weights": "parameters and buffers, counted once each",
    "gradients": "counted after the backward pass",
    "optimizer": "what the optimizer (AdamW, or Muon beside it) keeps between steps",
    "activations": "train: what the forward pass leaves for the backward; else what lives at the peak beside the rest",
    "state": "allocated by the state after the phase",
}
"""How each kind of byte was found; written into the records."""

COUNTED = "live tensors counted at every operator of the second run (the first one, warm-up, is left out)"
ALLOCATOR = "torch.cuda.max_memory_allocated over the second run, less what was allocated before the model"


def measure_memory(
    subject: Subject, *, phase: Phase = "train", batch_size: int = 1, length: int = 1024,
    limit_bytes: int | None = None, max_length: int = 1 << 20,
) -> Record:
    """A ``memory`` record. With ``limit_bytes``, ``longest`` is the most tokens a row whose peak stays within it.

    Nothing depends on what was measured before: everything is built afresh, and the peak begins with it.
    """
    device, dtype, identity = _probe(subject)
    note = None
    if device.type == "cuda":
        found, how = _gpu_footprint(subject, phase, batch_size, length), ALLOCATOR
        note = None if found else f"out of memory: {phase} at {batch_size} x {length} tokens does not fit the device"
    else:
        found, how = count_bytes(subject, phase, batch_size, length), COUNTED
    longest = None
    if limit_bytes is not None:
        longest = longest_that_fits(
            subject, phase=phase, batch_size=batch_size, limit_bytes=limit_bytes, max_length=max_length, device=device
        )
    fields: dict[str, Any] = {"phase": phase, "batch_size": batch_size, "length": length, "device": str(device)}
    fields["dtype"] = dtype
    parts = vars(found) if found else dict.fromkeys(vars(Footprint(0)))
    return make_record(
        "memory", identity, {**fields, **parts, "longest": longest, "how": {**HOW, "peak": how}, "note": note}
    )


def _probe(subject: Subject) -> tuple[torch.device, str, Identity]:
    """Device, dtype and identity, from a model that is let go again."""
    model = subject.build()
    return device_of(model), subject.dtype_of(model), subject.identity(model)


def longest_that_fits(
    subject: Subject, *, phase: Phase, batch_size: int, limit_bytes: int, max_length: int, device: torch.device
) -> dict[str, Any]:
    """``limit_bytes``, ``length`` (0: not even one token fits), ``phase``, and whether ``max_length`` ended the search.

    On a GPU every length is tried, and out of memory is an answer; on a CPU the peak is predicted.
    """
    if device.type == "cuda":
        found = longest_length(lambda n: _gpu_peak(subject, phase, batch_size, n), limit_bytes, max_length)
    else:
        predictor = Predictor(subject, phase)
        found = longest_length(lambda n: predictor.at(n, batch_size).peak, limit_bytes, max_length)
    return {
        "limit_bytes": limit_bytes, "length": found, "phase": phase, "batch_size": batch_size,
        "at_least": found == max_length,
    }


# -- by counting -------------------------------------------------------------------------------------------------------


def count_bytes(subject: Subject, phase: Phase, batch_size: int, length: int) -> Footprint:
    """The footprint of a phase on real tensors of the CPU."""
    gc.collect()
    with LiveBytes() as live:
        model = subject.build()
        step = make_step(phase, subject, model, batch_size, length)
        step.prepare()
        step.run()
        return count_step(live, step)


# -- by the allocator of a GPU -----------------------------------------------------------------------------------------


def on_gpu(subject: Subject, phase: Phase, batch_size: int, length: int) -> Footprint:
    """The footprint of a phase on a CUDA device; raises ``torch.OutOfMemoryError`` where it does not fit."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = subject.build()
    weights = [*model.parameters(), *model.buffers()]
    found = Footprint(storage_bytes(weights))
    step = make_step(phase, subject, model, batch_size, length)
    if isinstance(step, TrainStep):
        _allocated_in_training(step, found)
    else:
        step.prepare()
        step.run()
        step.prepare()
        if isinstance(step, DecodeStep):
            step.forget_start()
        torch.cuda.reset_peak_memory_stats()
        step.run()
        found.state = state_memory(getattr(step, "state", None))
    torch.cuda.synchronize()
    found.peak = torch.cuda.max_memory_allocated() - before
    found.reserved = torch.cuda.max_memory_reserved()
    if phase != "train":
        found.activations = found.peak - found.weights - found.state
    return found


def _allocated_in_training(step: TrainStep, found: Footprint) -> None:
    step.run()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    def after_forward() -> None:
        found.activations = torch.cuda.memory_allocated() - start

    def after_backward() -> None:
        found.gradients = storage_bytes(p.grad for p in step.model.parameters() if p.grad is not None)

    step.after_forward, step.after_backward = after_forward, after_backward
    step.run()
    found.optimizer = storage_bytes(step.optimizer_tensors())


def _gpu_footprint(subject: Subject, phase: Phase, batch_size: int, length: int) -> Footprint | None:
    """None: out of memory. What the failed attempt held is given back."""
    try:
        return on_gpu(subject, phase, batch_size, length)
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def _gpu_peak(subject: Subject, phase: Phase, batch_size: int, length: int) -> int | None:
    found = _gpu_footprint(subject, phase, batch_size, length)
    return None if found is None else found.peak
