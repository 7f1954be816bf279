"""Pareto fronts: which recipes nobody beats in both quality and cost. Read from records alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from hybridtf.bench.cells import failures_of
from hybridtf.bench.records import Record, select
from hybridtf.core import DataError

Better: TypeAlias = Literal["lower", "higher"]

STATE_LENGTH = "65536"
"""Tokens after which the bytes of state are compared: windows are full, and what grows has grown."""


def pareto_front(points: Sequence[Sequence[float]], better: Sequence[Better]) -> list[int]:
    """The places of the points (n c) that no other point dominates, in their order.

    A point dominates another one where it is at least as good in every coordinate and better in one; equal points stand or
    fall together. ``better`` (c): which way each coordinate is better. Raises :class:`DataError` for a coordinate that is
    not finite, and where the sizes differ.
    """
    if not points:
        return []
    if any(len(point) != len(better) for point in points):
        raise DataError(f"pareto_front: every point needs {len(better)} coordinates, as many as better has words")
    table = np.array(points, dtype=np.float64)
    if not np.isfinite(table).all():
        place = int(np.flatnonzero(~np.isfinite(table).all(1))[0])
        raise DataError(f"pareto_front: point {place} is not finite: {list(points[place])}")
    signs = np.array([1.0 if word == "lower" else -1.0 for word in better])
    costs = table * signs  # [n c]; less is better everywhere
    at_least = (costs[:, None] <= costs[None]).all(2)
    dominates = at_least & (costs[:, None] < costs[None]).any(2)  # [n n]: row i dominates column j
    return [int(i) for i in np.flatnonzero(~dominates.any(0))]


@dataclass(frozen=True)
class ParetoPoint:
    """One recipe: its ``cost``, its ``value`` (mean over the seeds, held out), and whether nobody beats it in both."""

    recipe: str
    recipe_hash: str | None
    cost: float
    value: float
    n_seeds: int
    on_front: bool


@dataclass(frozen=True)
class ParetoAxis:
    """Quality on one task against one cost (``state_bytes``, ``train_flops``, ``decode_seconds``: seconds a token).

    ``left_out``: recipes without a point, and why. """

    task: str
    metric: str
    higher_is_better: bool
    cost: str
    points: tuple[ParetoPoint, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)


def pareto_axes(records: Iterable[Record]) -> list[ParetoAxis]:
    """Quality against state bytes, operations of the training, and time of a decoded token, for every task that has points.

    A recipe with a seed that failed has no point: its mean would be over the seeds that went well.
    """
    found = list(records)
    measures = dict.fromkeys((r["task"], r["metric"], bool(r["higher_is_better"])) for r in select(found, "quality"))
    axes = []
    for task, metric, higher in measures:
        scores = _scores(found, task, metric)
        for cost, read in _COSTS.items():
            points: dict[tuple[str, str | None], tuple[float, float, int]] = {}
            left_out: dict[str, str] = {}
            for key, values in scores.items():
                amount, failed = read(found, key), failures_of(found, *key)
                if failed:
                    left_out[key[0]] = "; ".join(f"seed {seed}: {result}" for seed, result in failed.items())
                elif amount is None:
                    left_out[key[0]] = f"{cost} was not measured"
                else:
                    points[key] = (amount, math.fsum(values) / len(values), len(values))
            if points:
                axes.append(ParetoAxis(task, metric, higher, cost, _marked(points, higher), left_out))
    return axes


def _marked(points: Mapping[tuple[str, str | None], tuple[float, float, int]], higher: bool) -> tuple[ParetoPoint, ...]:
    front = set(pareto_front([point[:2] for point in points.values()], ("lower", "higher" if higher else "lower")))
    return tuple(
        ParetoPoint(name, digest, cost, value, n_seeds, i in front)
        for i, ((name, digest), (cost, value, n_seeds)) in enumerate(points.items())
    )


def _scores(records: Sequence[Record], task: str, metric: str) -> dict[tuple[str, str | None], list[float]]:
    """Values by recipe, one a seed: of two records of one seed the later one counts."""
    latest: dict[tuple[str, str | None], dict[int, float]] = {}
    for r in select(records, "quality", task=task, metric=metric):
        if r["value"] is not None:
            latest.setdefault((r["recipe"], r["recipe_hash"]), {})[r["seed"]] = r["value"]
    return {key: list(values.values()) for key, values in latest.items()}


def _latest(records: Sequence[Record], key: tuple[str, str | None], kind: str, **fields: Any) -> dict[int, Record]:
    return {r["seed"]: r for r in select(records, kind, recipe=key[0], recipe_hash=key[1], **fields)}


def _state_bytes(records: Sequence[Record], key: tuple[str, str | None]) -> float | None:
    sizes = [(r.get("state_bytes") or {}).get(STATE_LENGTH, {}).get("used") for r in _latest(records, key, "model").values()]
    return _mean(sizes)


def _train_flops(records: Sequence[Record], key: tuple[str, str | None]) -> float | None:
    return _mean([r.get("flops") for r in _latest(records, key, "train").values()])


def _decode_seconds(records: Sequence[Record], key: tuple[str, str | None]) -> float | None:
    times = Counter((r["batch_size"], r["length"]) for r in select(records, "speed", phase="decode"))
    if not times:
        return None
    # Several conditions do not compare: the one that most were measured at counts.
    batch_size, length = max(times, key=lambda condition: times[condition])
    found = _latest(records, key, "speed", phase="decode", batch_size=batch_size, length=length)
    rates = [r.get("tokens_per_s") for r in found.values()]
    return _mean([1 / rate if rate else None for rate in rates])


def _mean(values: Sequence[float | None]) -> float | None:
    """None where one of them is not known: a mean of the others would be of something else."""
    known = [float(value) for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


_COSTS = {"state_bytes": _state_bytes, "train_flops": _train_flops, "decode_seconds": _decode_seconds}
