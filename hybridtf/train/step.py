"""One optimizer step: the gradient over the rows of an accumulation window, each scored token weighing the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from hybridtf.core import ConfigError, known_names
from hybridtf.models import LanguageModel
from hybridtf.tasks import Batch
from hybridtf.train.config import TrainConfig
from hybridtf.train.precision import autocast
from hybridtf.train.teacher import LOGITS, Teacher


@dataclass
class Sums:
    """Summed over scored tokens: ``nats``, and auxiliary losses as [sum, count]."""

    nats: float = 0.0
    n_tokens: int = 0
    losses: dict[str, list[float]] = field(default_factory=dict)

    def add(self, other: Sums) -> None:
        self.nats += other.nats
        self.n_tokens += other.n_tokens
        for name, (total, count) in other.losses.items():
            mine = self.losses.setdefault(name, [0.0, 0.0])
            mine[0] += total
            mine[1] += count

    @property
    def loss(self) -> float:
        """Nats a token; 0 where none was scored."""
        return self.nats / max(self.n_tokens, 1)

    def means(self) -> dict[str, float]:
        """The auxiliary losses."""
        return {name: total / max(count, 1.0) for name, (total, count) in sorted(self.losses.items())}

    def finite(self) -> bool:
        return math.isfinite(self.nats) and all(math.isfinite(total) for total, _ in self.losses.values())


def check_loss_weights(model: nn.Module, weights: Mapping[str, float]) -> None:
    """Raise :class:`ConfigError` for a weight of a loss that no part of the model has."""
    known = {name for module in model.modules() for name in getattr(module, "losses", ())}
    for name in weights:
        if name not in known:
            raise ConfigError(f"train.loss_weights: the model has no loss named {name!r}. {known_names(name, known)}")


def accumulate(
    model: LanguageModel, batches: Sequence[Batch], config: TrainConfig, scaler: torch.amp.GradScaler,
    device: torch.device, teacher: Teacher | None = None,
) -> Sums:
    """Add the window's gradient to ``.grad`` and return its sums.

    The loss is the sum over all scored tokens of the window divided by their number, never a mean of means. An
    auxiliary loss (sum, count) of each forward is weighted by its share of the window's real tokens, which gives sum /
    count of the window where its count is proportional to them. ``teacher``: what is to be matched, with its own weights; the
    divergence of scores is weighted by the share of scored tokens.
    """
    weights = config.loss_weights if teacher is None else {**config.loss_weights, **teacher.weights}
    weight = 1.0 if teacher is None else teacher.total_weight
    n_scored = max(sum(batch.n_tokens for batch in batches), 1)
    n_real = [_n_real(batch) for batch in batches]
    sums = Sums()
    for batch, real in zip(batches, n_real, strict=True):
        moved = batch.to(device)
        with autocast(config.precision, device):
            found = model.loss(moved.inputs, moved.targets, moved.segments) if teacher is None else teacher.loss(model, moved)
        # H of layers alone is a mean over real tokens, and is logged as others are: over the scored ones.
        nats = found.total * (n_scored / max(sum(n_real), 1)) if teacher is not None and teacher.alone else found.total
        loss = weight * nats / n_scored
        for name, (total, count) in found.losses.items():
            share = batch.n_tokens / n_scored if name == LOGITS else real / max(sum(n_real), 1)
            loss = loss + weights.get(name, 1.0) * share * total / count.clamp(min=1)
        scaler.scale(loss).backward()
        sums.add(_read(nats, batch.n_tokens, found.losses))
    return sums


@runtime_checkable
class AfterStep(Protocol):
    """A module that changes something of its own after each optimizer step (a router's selection bias)."""

    def after_step(self) -> None: ...


def after_step(*parts: nn.Module) -> None:
    """Tell every :class:`AfterStep` of a model, or of the parts of it that are trained, that an optimizer step is done."""
    for module in {id(module): module for part in parts for module in part.modules()}.values():
        if isinstance(module, AfterStep):
            module.after_step()


def _n_real(batch: Batch) -> int:
    return batch.inputs.numel() if batch.segments is None else int(batch.segments.real.sum())


def _read(total: Tensor, n_tokens: int, losses: Mapping[str, tuple[Tensor, Tensor]]) -> Sums:
    """As numbers, with one wait for the device."""
    flat = [total, *(value for pair in losses.values() for value in pair)]
    nats, *rest = torch.stack([value.detach().double() for value in flat]).tolist()
    pairs = {name: [rest[2 * i], rest[2 * i + 1]] for i, name in enumerate(losses)}
    return Sums(nats, n_tokens, pairs)


def clip(model: nn.Module, max_norm: float) -> float:
    """The norm of the gradient before it was scaled down to ``max_norm`` (0: never); inf and NaN leave it alone."""
    params = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    value = float(norm)
    if max_norm > 0 and math.isfinite(value):
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return value
