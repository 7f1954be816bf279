"""What a run tells: after a step, at its end; and how long it is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from hybridtf.core import ConfigError
from hybridtf.models import LanguageModel
from hybridtf.recipe import Recipe
from hybridtf.tasks import Stream, Task
from hybridtf.train.config import EvalTokens, TrainConfig
from hybridtf.train.evaluate import EvalResult


@dataclass(frozen=True)
class StepReport:
    """What ``on_step`` is told after every step (from 1): ``loss`` in nats a token, the ``norm`` before clipping."""

    step: int
    loss: float
    lr: float
    norm: float
    n_tokens: int
    model: LanguageModel


@dataclass(frozen=True, eq=False)
class TrainResult:
    """A finished run: its folder, last checkpoint, the model, and what the last evaluation found.

    ``tokens``: those that training scored. ``seconds``: of training; ``eval_seconds``: of evaluation, in this call.
    ``metrics``: of the evaluation at the end, None where none was asked for; ``ema_metrics``: those of the average.
    ``evaluation``: all of it, where this call made it; a finished run that is resumed is not evaluated again.
    """

    path: Path
    checkpoint: Path
    recipe: Recipe
    model: LanguageModel
    steps: int
    tokens: int
    seconds: float
    evaluation: EvalResult | None
    metrics: Mapping[str, float] | None
    ema_metrics: Mapping[str, float] | None
    eval_seconds: float
    stopped_at_step: int | None = None
    """The step whose check reached ``stop_at``; None for a run of all its steps."""


@runtime_checkable
class HasEpochs(Protocol):
    """A stream that knows how many rows an epoch has."""

    @property
    def rows_in_epoch(self) -> int: ...


def planned_steps(config: TrainConfig, stream: Stream) -> int:
    """Optimizer steps of the run. Raises :class:`ConfigError` for epochs of a task that has none."""
    rows = config.batch_size * config.accumulation
    if config.steps is not None:
        return config.steps
    if config.tokens is not None:
        return -(-config.tokens // (rows * config.seq_len))
    if not isinstance(stream, HasEpochs):
        raise ConfigError("train.epochs: this task makes its data as it goes and has no epochs; give steps or tokens")
    return math.ceil((config.epochs or 0.0) * stream.rows_in_epoch / rows)


def planned_tokens(task: Task, eval_tokens: EvalTokens) -> str:
    """How many held-out tokens an evaluation scores, in words."""
    if eval_tokens == "all":
        return "all"
    held_out = [split.n_tokens for split in task.splits() if split.name == "held_out" and split.n_tokens]
    return f"up to {min([eval_tokens, *held_out]):,}"


def bytes_per_token(task: Task) -> float | None:
    """UTF-8 bytes a token of the training side; None for tasks that are not text."""
    for split in task.splits():
        if split.name == "train" and split.n_tokens and split.n_bytes:
            return split.n_bytes / split.n_tokens
    return None


def scores_of(result: EvalResult) -> dict[str, float]:
    """An evaluation as a line of the log has it."""
    return {"loss": result.loss, **result.metrics}


def in_words(result: EvalResult) -> str:
    """The same for a person."""
    return "  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
