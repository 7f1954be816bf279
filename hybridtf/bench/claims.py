"""Whether records bear out that a model reads long rows, and in which words; what they do not bear out is refused.

One needle is found by models that do nothing else with a long text (Yen et al., *HELMET*, https://arxiv.org/abs/2410.02694), a
single depth by those that see the end alone, a few rows by luck, and a length that was trained on by all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridtf.bench.long_rows import FIELDS
from hybridtf.core import DataError

LEAST_ROWS = 100
LEAST_TASKS = 2
LEAST_DEPTHS = 2
NO_CLAIM = "no claim about long rows"
GOOD = 0.856
"""Accuracy that a claim asks for: what RULER (https://arxiv.org/abs/2404.06654) calls effective."""


class ClaimError(DataError):
    """Records that do not bear out a claim; the message says what is missing."""


@dataclass(frozen=True)
class Claim:
    """``length`` tokens are read as well as ``threshold`` asks, ``ratio`` times the ``trained`` length (the longest, where they
    differ), on all of ``tasks``."""

    length: int
    trained: int
    tasks: tuple[str, ...]
    n_rows: int
    threshold: float

    @property
    def ratio(self) -> float:
        return self.length / self.trained

    def __str__(self) -> str:
        return (
            f"answers at least {100 * self.threshold:.1f} % right at {self.length:,} tokens, {self.ratio:g} times the trained "
            f"length of {self.trained:,}, on {' and '.join(self.tasks)} ({self.n_rows} rows or more a task)"
        )


def long_context_claim(records: Sequence[Mapping[str, Any]], *, threshold: float = GOOD) -> Claim:
    """The longest length that the ``extrapolation`` records of one model over drawn rows bear out; it was trained on each task.

    Raises :class:`ClaimError` where fewer than two tasks were measured, rows showed what was asked for at one depth alone, a
    length has fewer than 100 rows, none is past the trained one, or answers past it are not right often enough: the lower end
    of the interval of the task's own metric must reach ``threshold`` for every task and seed, and at every length up to the one
    claimed.
    """
    found = [r for r in records if r.get("kind") == "extrapolation" and r.get("protocol") == "rows"]
    latest = {(str(r["task"]), r.get("seed")): r for r in found}  # measured again counts as it was last
    tasks: dict[str, list[Mapping[str, Any]]] = {}
    for (task, _), record in latest.items():
        tasks.setdefault(task, []).append(record)
    if len(tasks) < LEAST_TASKS:
        only = f"only {next(iter(tasks))!r} was measured" if tasks else "no task of drawn rows was measured"
        raise ClaimError(f"{NO_CLAIM}: {only}, and one task (a needle above all) does not tell; take {LEAST_TASKS}")
    if len({model_of(r) for r in latest.values()}) > 1:
        names = sorted({str(r.get("recipe")) for r in latest.values()})
        raise ClaimError(f"{NO_CLAIM}: the records are of several models: {', '.join(names)}")
    for (task, _), record in latest.items():
        _check_depths(task, record)
    return _longest(tasks, threshold)


def model_of(record: Mapping[str, Any]) -> str:
    """What model a record is of: runs of one model on several tasks are several recipes. Of a foreign model its name."""
    return str(record.get("model_hash") or record.get("recipe"))


def _check_depths(task: str, record: Mapping[str, Any]) -> None:
    grid = record.get("grid")
    if grid is None:
        return
    trained = record["trained_length"]
    for length, counts in zip(grid["lengths"], grid["n"], strict=True):
        if length > trained and 0 < sum(n > 0 for n in counts) < LEAST_DEPTHS:
            raise ClaimError(f"{NO_CLAIM}: {task!r} was asked at one depth alone at {length} tokens")


def _worst_of_seeds(records: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """By length: what the seed answered that is surely right least often; lengths that all seeds have."""
    seeds = [_answered(record) for record in records]
    shared = set.intersection(*map(set, seeds))
    return {n: min((entries[n] for entries in seeds), key=_surely_right) for n in shared}


def _answered(record: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """By length: ``n_rows``, and ``low``, the lower end of the interval of the share that is right in the task's own metric (0
    where one row shows none); lengths at which it was measured. An answer is not right because most of its tokens are."""
    names = FIELDS.get(record.get("metric", "accuracy"))
    if names is None:
        return {}
    value, spread, _ = names
    return {
        e["length"]: {"n_rows": e["n_rows"], "low": float((e[spread] or [0.0])[0])}
        for e in record["by_length"] if e.get(value) is not None
    }


def _surely_right(entry: Mapping[str, Any]) -> float:
    return float(entry["low"])


def _longest(tasks: Mapping[str, Sequence[Mapping[str, Any]]], threshold: float) -> Claim:
    trained = max(int(record["trained_length"]) for records in tasks.values() for record in records)
    measured = {task: _worst_of_seeds(records) for task, records in tasks.items()}
    shared = sorted(set.intersection(*(set(entries) for entries in measured.values())))
    past = [length for length in shared if length > trained]
    if not past:
        raise ClaimError(f"{NO_CLAIM}: no length past the trained {trained} tokens was measured on all tasks")
    good: list[int] = []
    for length in past:
        entries = {task: entries[length] for task, entries in measured.items()}
        few = [f"{task!r} has {e['n_rows']}" for task, e in entries.items() if e["n_rows"] < LEAST_ROWS]
        if few and not good:
            raise ClaimError(
                f"{NO_CLAIM}: fewer than {LEAST_ROWS} rows at {length} tokens, {length / trained:g} times the trained length "
                f"({', '.join(few)})"
            )
        low = {task: _surely_right(e) for task, e in entries.items()}
        if few or min(low.values()) < threshold:
            break
        good.append(length)
    if not good:
        worst = min(low, key=low.__getitem__)
        raise ClaimError(
            f"{NO_CLAIM}: at {past[0]} tokens, {past[0] / trained:g} times the trained length, {worst!r} is surely right for "
            f"{100 * low[worst]:.1f} % alone; {100 * threshold:.1f} % are asked for"
        )
    n_rows = min(entries[good[-1]]["n_rows"] for entries in measured.values())
    return Claim(good[-1], trained, tuple(sorted(tasks)), n_rows, threshold)
