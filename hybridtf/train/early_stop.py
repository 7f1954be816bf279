"""``[train] stop_at``: a run ends at the first check that finds the task learnt.

A check comes every ``stop_every`` steps and scores, with dropout off and without a change to any random state, the task's
measure on the first group of its third side (``task.validation``; its first group is of the size that the test lists first, so
list the trained one there), on all of it where the task tells no groups apart; at most ``STOP_TOKENS`` tokens. What it found
stands in the log, so that a run killed anywhere ends at the same step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hybridtf.models import LanguageModel
from hybridtf.tasks import Task
from hybridtf.train.config import TrainConfig
from hybridtf.train.evaluate import evaluate

STOP_TOKENS = 100_000


@dataclass(frozen=True)
class Check:
    """What a check found; ``group`` is "" where the task tells none apart."""

    group: str
    metric: str
    value: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @property
    def words(self) -> str:
        """As in ``accuracy of 64 tokens 0.9921``."""
        return f"{self.metric}{f' of {self.group}' if self.group else ''} {self.value:.4f}"


class EarlyStop:
    """When a run is to be checked, and whether a check ends it.

    Raises :class:`ConfigError` for ``stop_at`` on a task that keeps no third side.
    """

    def __init__(self, config: TrainConfig, task: Task) -> None:
        self.config, self.level = config, config.stop_at
        # Not the held-out side: a run that ends when that looks good would be judged by what chose it.
        self.task = task if self.level is None else task.validation()

    def due(self, step: int) -> bool:
        """Whether a check belongs to the step just done."""
        return self.level is not None and step > 0 and step % self.config.stop_every == 0

    def reached(self, value: float | None) -> bool:
        """Whether a check that found ``value`` (None: there was none) ends the run."""
        if self.level is None or value is None:
            return False
        return value >= self.level if self.task.higher_is_better else value <= self.level

    def check(self, model: LanguageModel) -> Check:
        """Score the first group."""
        config = self.config
        with torch.compiler.set_stance("force_eager" if config.compile else "default"):
            result = evaluate(
                model, self.task, seq_len=config.seq_len, batch_size=config.batch_size, max_tokens=STOP_TOKENS,
                context=config.eval_context, precision=config.precision, first_group=True,
            )
        metric = self.task.metric
        return Check(result.by_document[0].group, metric, result.metrics[metric])


def stopped_at_step(log: Iterable[Mapping[str, Any]]) -> int | None:
    """The step at which a check ended the run whose log has these lines; None where none did, or the run went on from there."""
    checked, trained = 0, 0
    for line in log:
        if line.get("event") == "check" and line["reached"]:
            checked = line["step"]
        if line.get("event") == "train":
            trained = line["step"]
    return checked if 0 < checked == trained else None
