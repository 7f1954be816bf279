"""The score of a stack: a mean over tasks in which each counts alike, from records alone.

A measure v of a task is put between b, the best trivial model that the task knows (``baselines``), and what is perfect:

    (v - b) / (1 - b)  where higher is better (shares),    1 - v / b  where lower is better (losses, bits a byte),

and 0 where that is below 0. The score of a task is the mean over its groups of rows (sizes, lengths), so that rows beyond the
trained length count as much as those within; then over seeds, then over tasks. It is taken on the third side of each task.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hybridtf.bench import Record
from hybridtf.core import ConfigError


@dataclass(frozen=True)
class Scores:
    """``by_task`` (0 to 1), each the mean over seeds; ``failed``: what went wrong in which task."""

    by_task: Mapping[str, float]
    failed: Mapping[str, str]

    @property
    def mean(self) -> float | None:
        """Over all tasks; None where one of them failed: it is no zero, and it is not left out."""
        if self.failed or not self.by_task:
            return None
        return math.fsum(self.by_task.values()) / len(self.by_task)


def normalised(value: float, baselines: Mapping[str, float], *, higher_is_better: bool, task: str = "") -> float:
    """``value`` between the best trivial model (0) and what is perfect (1). Raises :class:`ConfigError` where the task knows
    no trivial model."""
    if not baselines:
        raise ConfigError(f"the task {task!r} knows no trivial model, so its measure cannot be averaged with others")
    best = max(baselines.values()) if higher_is_better else min(baselines.values())
    return max((value - best) / (1 - best) if higher_is_better else 1 - value / best, 0.0)


def score_of(record: Mapping[str, Any]) -> float:
    """The score of one ``sweep`` (or ``quality``) record: the mean over its groups."""
    values = [group["value"] for group in record["groups"].values()] or [record["value"]]
    how = {"higher_is_better": record["higher_is_better"], "task": record["task"]}
    return math.fsum(normalised(value, record["baselines"], **how) for value in values) / len(values)


def scores(records: Iterable[Record]) -> Scores:
    """The scores of one stack from its ``sweep`` records; of learning rates the best mean over seeds counts, and a learning
    rate of which a seed failed does not. Of two records of one training the later counts."""
    latest = {(r["task"], r["lr"], r["seed"]): r for r in records if r["kind"] == "sweep"}
    by_task: dict[str, float] = {}
    failed: dict[str, str] = {}
    for task in dict.fromkeys(task for task, _, _ in latest):
        rates: dict[float, list[Record]] = {}
        for (name, lr, _), record in latest.items():
            if name == task:
                rates.setdefault(lr, []).append(record)
        whole = [tried for tried in rates.values() if not any(r["failed"] for r in tried)]
        if whole:
            by_task[task] = max(math.fsum(map(score_of, tried)) / len(tried) for tried in whole)
        else:
            failed[task] = next(str(r["failed"]) for tried in rates.values() for r in tried if r["failed"])
    return Scores(by_task, failed)
