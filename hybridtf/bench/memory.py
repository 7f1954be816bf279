"""Memory by kind, its peak, and the longest length that fits under a limit.

On the CPU live tensors are counted, on real tensors or, to predict, on shapes without memory: the same code and the
same bytes, as the tests check. On a GPU the peak is the allocator's own. """

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from hybridtf.bench.live_bytes import LiveBytes, WithoutMemory, storage_bytes
from hybridtf.bench.longest import longest_length
from hybridtf.bench.phases import DecodeStep, LastDecodeStep, Phase, Step, TrainStep, make_step
from hybridtf.bench.records import Record, make_record
from hybridtf.bench.subject import Identity, Subject, device_of
from hybridtf.core import StateLeaf

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


@dataclass
class Footprint:
    """Bytes of one phase, by kind. ``reserved``: what the CUDA allocator held at its peak."""

    weights: int
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    state: int = 0
    peak: int = 0
    reserved: int | None = None


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
        predict = predictor(subject, phase, batch_size)
        found = longest_length(lambda n: predict(n).peak, limit_bytes, max_length)
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
        return _count(live, step)


def predict_bytes(subject: Subject, phase: Phase, batch_size: int, length: int) -> Footprint:
    """The same without the memory. A decode state then only claims to hold its prompt.

    Raises :class:`ConfigError` for a model that reads computed values back.
    """
    return predictor(subject, phase, batch_size)(length)


def predictor(subject: Subject, phase: Phase, batch_size: int) -> Callable[[int], Footprint]:
    """Length -> :class:`Footprint`, as :func:`predict_bytes`, from one model that is built and warmed up once."""
    world = WithoutMemory()
    with world.enter():
        model = world.adopt(subject.build())
        optimizer = _warm_optimizer(subject, model, batch_size) if phase == "train" else None
    sizes = (subject.vocab_size, batch_size)

    def predict(length: int) -> Footprint:
        gc.collect()
        with world.enter() as live:
            step: Step
            if optimizer is not None:
                step = TrainStep(model, *sizes, length, subject.autocast, optimizer)
            elif phase == "decode":
                step = LastDecodeStep(model, *sizes, length, subject.autocast)
            else:
                step = make_step(phase, subject, model, batch_size, length)
            return _count(live, step)

    return predict


def _warm_optimizer(subject: Subject, model: nn.Module, batch_size: int) -> torch.optim.Optimizer:
    """An optimizer that has made its state, by one short step."""
    made = subject.optimizer(model) if subject.optimizer is not None else None
    step = TrainStep(model, subject.vocab_size, batch_size, 1, subject.autocast, made)
    step.run()
    return step.optimizer


def _count(live: LiveBytes, step: Step) -> Footprint:
    """The footprint of one more run of a step that is warmed up."""
    weights = [*step.model.parameters(), *step.model.buffers()]
    live.watch(weights)
    found = Footprint(storage_bytes(weights))
    if isinstance(step, TrainStep):
        _count_training(live, step, found)
    else:
        _count_reading(live, step, found)
    return found


def _count_training(live: LiveBytes, step: TrainStep, found: Footprint) -> None:
    before = live.now
    live.reset_peak()

    def after_forward() -> None:
        found.activations = live.now - before

    def after_backward() -> None:
        found.gradients = storage_bytes(p.grad for p in step.model.parameters() if p.grad is not None)

    step.after_forward, step.after_backward = after_forward, after_backward
    step.run()
    found.peak = live.peak
    found.optimizer = storage_bytes(step.optimizer_tensors())


def _count_reading(live: LiveBytes, step: Step, found: Footprint) -> None:
    step.prepare()
    if isinstance(step, DecodeStep):
        step.forget_start()
    live.reset_peak()
    step.run()
    found.peak = live.peak
    found.state = state_memory(getattr(step, "state", None))
    found.activations = found.peak - found.weights - found.state


def state_memory(state: Any) -> int:
    """Bytes behind all tensors of a state, lengths included."""
    kept: list[Tensor] = []
    for leaf in pytree.tree_leaves(state, is_leaf=lambda x: isinstance(x, StateLeaf)):
        if isinstance(leaf, StateLeaf):
            kept += [*leaf.tensors().values(), leaf.length]
        elif isinstance(leaf, Tensor):
            kept.append(leaf)
    return storage_bytes(kept)


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
