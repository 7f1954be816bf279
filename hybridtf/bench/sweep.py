"""Choosing a learning rate: the best mean over the seeds on a side of the task that is neither trained on nor held out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridtf.bench.arms import Arm, Group
from hybridtf.bench.records import Record, select


@dataclass(frozen=True)
class Choice:
    """The arm that was chosen, and ``note``: what a reader must know of the choice. ``swept``: the learning rates chosen from,
    None where there was one."""

    arm: Arm
    note: str | None = None
    swept: list[float] | None = None

    def fields(self) -> dict[str, Any]:
        """What the ``quality`` records of the arm say of it."""
        lr = self.arm.config.lr
        return {"lr": lr, "chosen_lr": None if self.swept is None else lr, "swept": self.swept, "note": self.note}


def choose(records: Iterable[Record], group: Group, seeds: Sequence[int]) -> Choice:
    """The arm of ``group`` with the best mean over ``seeds`` in its ``sweep`` records.

    A learning rate of which a seed failed has no mean, so it cannot be chosen while another has one; where none has, it is the
    one of which most seeds went well. ``note`` says which were left out, and that the best is the lowest or highest that was
    tried: a better one may lie beyond.
    """
    if len(group) == 1:
        return Choice(group[0])
    found = list(records)
    scores = {arm.config.lr: scores_of(found, arm, seeds) for arm in group}
    means = {lr: mean for lr, (mean, _) in scores.items() if mean is not None}
    arms = {arm.config.lr: arm for arm in group}
    rates = list(scores)
    left_out = [f"lr {lr:g} ({', '.join(failed.values())})" for lr, (_, failed) in scores.items() if failed]
    notes = [f"not chosen from, since a seed failed: {'; '.join(left_out)}"] if left_out else []
    if not means:
        best = min(scores, key=lambda lr: len(scores[lr][1]))
        return Choice(arms[best], "; ".join(["no learning rate went well with every seed", *notes]), rates)
    best = _best(found, group, means)
    ends = {min(arms): "lowest", max(arms): "highest"}
    if best in ends:
        notes.append(f"the chosen lr {best:g} is the {ends[best]} that was tried: a better one may lie beyond")
    return Choice(arms[best], "; ".join(notes) or None, rates)


def _best(records: Sequence[Record], group: Group, means: Mapping[float, float]) -> float:
    higher = any(r["higher_is_better"] for arm in group for r in _of(records, arm) if not r["failed"])
    return (max if higher else min)(means, key=lambda lr: means[lr])


def scores_of(records: Sequence[Record], arm: Arm, seeds: Sequence[int]) -> tuple[float | None, dict[int, str]]:
    """The mean of an arm over the seeds, None unless each has a score; and the seeds that have none, with why."""
    latest = {r["seed"]: r for r in _of(records, arm)}
    values = {seed: r["value"] for seed, r in latest.items() if not r["failed"]}
    missing = {seed: str(latest[seed]["result"]) if seed in latest else "not_run" for seed in seeds if seed not in values}
    return (None if missing else math.fsum(values[seed] for seed in seeds) / len(seeds)), missing


def _of(records: Sequence[Record], arm: Arm) -> list[Record]:
    return select(records, "sweep", recipe=arm.name, recipe_hash=arm.recipe_hash)
