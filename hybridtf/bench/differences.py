"""Differences between recipes on the same held-out rows, with intervals: which recipe is better, and how surely.

Two recipes are scored on the same documents (or rows) and trained with the same seeds, so their scores move together: the
interval of the difference is drawn over pairs, and is narrower than two intervals side by side suggest. Documents are drawn
again with replacement (Efron 1979), for all seeds alike, and so are the seeds. Few seeds show too little of their spread: what
they add is widened by sqrt(n / (n - 1)) and by Student's t over the normal's, so that two or three seeds are not too sure.

Axes: r draws, s seeds, n documents, c sums (the fields of ``Totals``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from hybridtf.bench.bootstrap import DRAWS, Floats, student_factor
from hybridtf.bench.cells import failures_of
from hybridtf.bench.quality import COLUMNS, ratio
from hybridtf.bench.records import Record, select
from hybridtf.core import DataError, known_names

Verdict: TypeAlias = Literal["better", "worse", "~", "unknown"]

LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    """``recipe`` against ``other``: ``value`` is the metric of the first less that of the second, over the seeds of both.

    ``low``, ``high``: of its 95 % interval, None where one seed and one document show no spread. ``p``: two-sided, after
    Holm's correction (1979) over all pairs of the task, so that one pair in many is not called better by chance. ``verdict``:
    of ``recipe``, by that p; ``~``: the difference does not show; ``unknown``: it cannot be told, and ``note`` says why.
    """

    task: str
    metric: str
    recipe: str
    other: str
    value: float | None
    low: float | None
    high: float | None
    p: float | None
    n_seeds: int
    n_documents: int
    verdict: Verdict
    note: str | None = None


@dataclass(frozen=True)
class _Scored:
    """What one recipe reached on one task, by seed."""

    recipe: str
    by_seed: Mapping[int, Record]
    failed: Mapping[int, str]


def pairwise(records: Iterable[Record], metric: str | None = None, *, draws: int = DRAWS, seed: int = 0) -> list[Difference]:
    """Every pair of recipes on every task, of the ``quality`` records whose metric is ``metric`` (None: each task's own).

    A recipe of which a seed failed has no mean to compare: its verdicts are ``unknown``. Raises :class:`DataError` for a metric
    that no record has.
    """
    found = list(records)
    quality = select(found, "quality")
    known = sorted({r["metric"] for r in quality})
    if metric is not None and metric not in known:
        raise DataError(f"no quality record has the metric {metric!r}. {known_names(metric, known)}")
    out = []
    for task, name in dict.fromkeys((r["task"], r["metric"]) for r in quality if metric in (None, r["metric"])):
        same = select(quality, "quality", task=task, metric=name)
        pairs = itertools.combinations(_scored(found, same), 2)
        out += _holm([_difference(task, name, a, b, draws, seed) for a, b in pairs], bool(same[0]["higher_is_better"]))
    return out


def _scored(records: Sequence[Record], quality: Sequence[Record]) -> list[_Scored]:
    groups: dict[tuple[str, str | None], dict[int, Record]] = {}
    for r in quality:  # of two records of one seed the later one counts
        groups.setdefault((r["recipe"], r["recipe_hash"]), {})[r["seed"]] = r
    names = [name for name, _ in groups]
    out = []
    for (name, digest), found in groups.items():
        label = name if names.count(name) == 1 else f"{name} ({(digest or 'no hash')[:7]})"
        out.append(_Scored(label, found, failures_of(records, name, digest)))
    return out


def _difference(task: str, metric: str, one: _Scored, two: _Scored, draws: int, seed: int) -> Difference:
    seeds = sorted(s for s in {*one.by_seed} & {*two.by_seed} if None not in (one.by_seed[s]["value"], two.by_seed[s]["value"]))
    unknown = Difference(task, metric, one.recipe, two.recipe, None, None, None, None, len(seeds), 0, "unknown")
    failed = [f"{side.recipe}, seed {s}: {result}" for side in (one, two) for s, result in side.failed.items()]
    if failed:
        return replace(unknown, note="; ".join(failed))
    if not seeds:
        return replace(unknown, note="no seed in common")
    pairs = [(one.by_seed[s], two.by_seed[s]) for s in seeds]
    values = np.array([a["value"] - b["value"] for a, b in pairs])
    units, why = _units(metric, pairs)
    drawn = _draw(values, units, metric, draws, seed)
    notes = [why] if why else []
    if len(seeds) == 1:
        notes.append("one seed: the interval says nothing of what another one would give")
    low = high = p = None
    if drawn is not None:
        low, high = (float(q) for q in np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
        tail = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
        p = min(1.0, 2 * (tail + 1) / (draws + 1))
    n_documents = 0 if units is None else units.shape[2]
    return replace(
        unknown, value=math.fsum(values) / len(values), low=low, high=high, p=p, n_documents=n_documents,
        note="; ".join(notes) or None,
    )


def _units(metric: str, pairs: Sequence[tuple[Record, Record]]) -> tuple[Floats | None, str | None]:
    """Sums (2 s n c) of both recipes, documents in one order; or None, and why seeds alone are drawn."""
    tables = [[unit_table(record) for record in side] for side in zip(*pairs, strict=True)]
    if any(table is None for side in tables for table in side):
        return None, "no sums by document are recorded: drawn over seeds alone"
    shapes = {table.shape for side in tables for table in side if table is not None}
    if len(shapes) > 1:
        return None, "scored on different documents: drawn over seeds alone"
    units = np.array(tables, dtype=np.float64)
    if ratio(metric, units[:, :, 0]) is None:
        return None, f"no formula of {metric} over documents is known: drawn over seeds alone"
    # Tokens count as far as the documents go: other tokenizers have other ones, and texts the same bytes.
    size = COLUMNS.index("n_bytes" if units[..., COLUMNS.index("n_bytes")].any() else "n_tokens")
    if (units[..., size] != units[:1, :1, :, size]).any():
        return None, "scored on different documents: drawn over seeds alone"
    return units, None


def unit_table(record: Record) -> Floats | None:
    """(n c) sums of each document of a ``quality`` record, a column a field of ``Totals``; None where it has none."""
    units: Any = record.get("units")
    n = record.get("n_documents")
    if not isinstance(units, Mapping) or not isinstance(n, int) or any(name not in units for name in COLUMNS):
        return None
    columns = [np.broadcast_to(np.asarray(units[name], dtype=np.float64), (n,)) for name in COLUMNS]
    table: Floats = np.stack(columns, axis=1)
    return table


def _draw(values: Floats, units: Floats | None, metric: str, draws: int, seed: int) -> Floats | None:
    """(r) differences under drawn documents and seeds; None where neither can vary."""
    n_seeds = len(values)
    n_documents = 0 if units is None else units.shape[2]
    if n_seeds < 2 and n_documents < 2:
        return None
    generator = np.random.default_rng(seed)
    by_seed = np.broadcast_to(values, (draws, n_seeds))
    if units is not None and n_documents > 1:
        counts = generator.multinomial(n_documents, np.full(n_documents, 1 / n_documents), size=draws).astype(np.float64)
        scores = ratio(metric, np.tensordot(counts, units, axes=(1, 2)))  # [r 2 s]
        assert scores is not None  # _units has seen to that
        by_seed = scores[:, 0] - scores[:, 1]  # [r s]
        by_seed = by_seed[np.isfinite(by_seed).all(1)]  # a draw of documents without a scored row has no score
    centre = by_seed.mean(1)
    if n_seeds < 2:
        return np.asarray(centre)
    chosen = generator.multinomial(n_seeds, np.full(n_seeds, 1 / n_seeds), size=len(by_seed)) / n_seeds
    return np.asarray(centre + student_factor(n_seeds) * ((chosen * by_seed).sum(1) - centre))


def _holm(found: list[Difference], higher_is_better: bool) -> list[Difference]:
    """The pairs with p corrected (the smallest of m times m, the next times m - 1, ..., never falling) and their verdicts."""
    order = sorted((i for i, d in enumerate(found) if d.p is not None), key=lambda i: (found[i].p, i))
    largest = 0.0
    for place, i in enumerate(order):
        p, value = found[i].p, found[i].value
        assert p is not None
        assert value is not None
        largest = max(largest, min(1.0, p * (len(order) - place)))
        verdict: Verdict = "~" if largest >= 1 - LEVEL else "better" if (value > 0) == higher_is_better else "worse"
        found[i] = replace(found[i], p=largest, verdict=verdict)
    return [replace(d, note=d.note or "one seed and one document show no spread") if d.p is None else d for d in found]
