"""Bytes of a phase by kind, and its peak, on shapes without memory: the same code and the same bytes as on real tensors."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from hybridtf.core import StateLeaf
from hybridtf.cost.flops import CountWork
from hybridtf.cost.live_bytes import LiveBytes, WithoutMemory, storage_bytes
from hybridtf.cost.phases import DecodeStep, LastDecodeStep, Phase, Planned, PrefillStep, Step, TrainStep


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

    @property
    def fixed(self) -> int:
        """What no length and no batch changes."""
        return self.weights + self.gradients + self.optimizer


def predict_bytes(planned: Planned, phase: Phase, batch_size: int, length: int) -> Footprint:
    """The footprint of a phase without its memory. A decode state then only claims to hold its prompt.

    Raises :class:`ConfigError` for a model that reads computed values back.
    """
    return Predictor(planned, phase).at(length, batch_size)


class Predictor:
    """:func:`predict_bytes` at many sizes, from one model that is built and warmed up once."""

    def __init__(self, planned: Planned, phase: Phase) -> None:
        self._planned, self._phase, self._world = planned, phase, WithoutMemory()
        with self._world.enter():
            self.model = self._world.adopt(planned.build())
            self._optimizer = _warm_optimizer(planned, self.model) if phase == "train" else None
        gc.collect()
        self._lasting = self._world.live.now

    def at(self, length: int, batch_size: int, counter: CountWork | None = None) -> Footprint:
        """The footprint; ``counter`` is told of the work."""
        if self._world.live.now > self._lasting:  # a cycle holds what the last run left; a collection takes as long as a run
            gc.collect()
        sizes = (self._planned.vocab_size, batch_size, length, self._planned.autocast)
        with self._world.enter() as live:
            step: Step
            if self._optimizer is not None:
                step = TrainStep(self.model, *sizes, self._optimizer)
            elif self._phase == "decode":
                step = LastDecodeStep(self.model, *sizes)
            else:
                step = PrefillStep(self.model, *sizes)
            return count_step(live, step, counter)


def _warm_optimizer(subject: Planned, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has made its state, by one short step."""
    made = subject.optimizer(model) if subject.optimizer is not None else None
    step = TrainStep(model, subject.vocab_size, 1, 1, subject.autocast, made)
    step.run()
    return step.optimizer


def count_step(live: LiveBytes, step: Step, counter: CountWork | None = None) -> Footprint:
    """The footprint of one more run of a step that is warmed up; ``counter`` is told of the run's work."""
    weights = [*step.model.parameters(), *step.model.buffers()]
    live.watch(weights)
    found = Footprint(storage_bytes(weights))
    if isinstance(step, TrainStep):
        _count_training(live, step, found, counter)
    else:
        _count_reading(live, step, found, counter)
    return found


def _count_training(live: LiveBytes, step: TrainStep, found: Footprint, counter: CountWork | None) -> None:
    before = live.now
    live.reset_peak()

    def after_forward() -> None:
        found.activations = live.now - before
        if counter is not None:
            counter.part = "backward"

    def after_backward() -> None:
        found.gradients = storage_bytes(p.grad for p in step.model.parameters() if p.grad is not None)
        if counter is not None:
            counter.part = "update"

    step.after_forward, step.after_backward = after_forward, after_backward
    with counter or nullcontext():
        step.run()
    found.peak = live.peak
    found.optimizer = storage_bytes(step.optimizer_tensors())


def _count_reading(live: LiveBytes, step: Step, found: Footprint, counter: CountWork | None) -> None:
    step.prepare()
    if isinstance(step, DecodeStep):
        step.forget_start()
    live.reset_peak()
    with counter or nullcontext():
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
