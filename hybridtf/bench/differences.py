"""Differences between recipes on the same held-out rows, with intervals: which recipe is better, and how surely.

Two recipes are scored on the same documents (or rows) and trained with the same seeds, so their scores move together: the
interval of the difference is that of pairs, and is narrower than two intervals side by side suggest. Its variance is the sum of
two: that of the seeds' mean, and that of the documents, by the linear form of a ratio of sums (Cochran, *Sampling Techniques*,
1977, chapter 6). Interval and p are Student's, each part with its own degrees of freedom. Drawing few seeds or documents again
would be too sure: of two seeds there are four draws.

Axes: s seeds, n documents, c sums (the fields of ``Totals``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from hybridtf.bench.bootstrap import Floats
from hybridtf.bench.cells import failures_of
from hybridtf.bench.distributions import summed_half, summed_p
from hybridtf.bench.quality import COLUMNS, RATIOS
from hybridtf.bench.records import Record, select
from hybridtf.core import DataError, known_names

Verdict: TypeAlias = Literal["better", "worse", "~", "unknown"]

LEVEL = 0.95
FEWEST_DOCUMENTS = 10
"""Documents below which one seed bears no verdict: so few are seldom like a normal distribution, or like each other."""


@dataclass(frozen=True)
class Difference:
    """``recipe`` against ``other``: ``value`` is the metric of the first less that of the second, over the seeds of both.

    ``low``, ``high``: of its 95 % interval, None where nothing shows a spread. ``p``: two-sided, after
    Holm's correction (1979) over all pairs of the task, so that one pair in many is not called better by chance. ``verdict``:
    of ``recipe``, by that p; ``~``: the difference does not show; ``unknown``: it cannot be told, and ``note`` says why.
    ``n_documents``: with scored tokens, in both recipes' records; 0 where seeds alone say how sure the difference is.
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


def pairwise(records: Iterable[Record], metric: str | None = None) -> list[Difference]:
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
        out += _holm([_difference(task, name, a, b) for a, b in pairs], bool(same[0]["higher_is_better"]))
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


def _difference(task: str, metric: str, one: _Scored, two: _Scored) -> Difference:
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
    n_documents, by_document = (0, 0.0) if units is None else _of_documents(metric, units)
    found = replace(unknown, value=math.fsum(values) / len(values), n_documents=n_documents)
    return _judged(found, _of_seeds(values), by_document, [why] if why else [])


def _judged(found: Difference, by_seed: float, by_document: float, notes: list[str]) -> Difference:
    """The difference with its interval and p (before Holm's correction), of the variances of its mean by seed and by document;
    no p where so few values bear no verdict."""
    n_seeds, n_documents, value = found.n_seeds, found.n_documents, found.value
    assert value is not None
    few = n_documents < FEWEST_DOCUMENTS
    if n_seeds == 1:
        notes.append("one seed: the interval says nothing of what another one would give")
    if n_documents == 1:
        notes.append("one document: the interval says nothing of what another one would give")
    parts = [(variance, n - 1) for variance, n in ((by_seed, n_seeds), (by_document, n_documents)) if n > 1]
    if not parts or (few and by_seed + by_document <= 1e-24 * max(1.0, value**2)):
        n = "one seed" if n_seeds == 1 else f"{n_seeds} seeds"
        said = f" and {n_documents} document{'s' if n_documents > 1 else ''}" if n_documents else ""
        return replace(found, note="; ".join([*notes, f"{n}{said} show no spread"]))
    half, p = summed_half(1 - LEVEL, parts), None
    if n_seeds == 1 and few:
        needed = f"{FEWEST_DOCUMENTS} are needed, or more seeds"
        notes.append(f"one seed and {n_documents} documents are too few for a verdict: {needed}")
    else:
        p = summed_p(value, parts)
    return replace(found, low=value - half, high=value + half, p=p, note="; ".join(notes) or None)


def _units(metric: str, pairs: Sequence[tuple[Record, Record]]) -> tuple[Floats | None, str | None]:
    """Sums (2 s n c) of both recipes, documents in one order; or None, and why seeds alone count."""
    tables = [[unit_table(record) for record in side] for side in zip(*pairs, strict=True)]
    if any(table is None for side in tables for table in side):
        return None, "no sums by document are recorded: judged by seeds alone"
    shapes = {table.shape for side in tables for table in side if table is not None}
    if len(shapes) > 1:
        return None, "scored on different documents: judged by seeds alone"
    units = np.array(tables, dtype=np.float64)
    if metric not in RATIOS:
        return None, f"no formula of {metric} over documents is known: judged by seeds alone"
    # Tokens count as far as the documents go: other tokenizers have other ones, and texts the same bytes.
    size = COLUMNS.index("n_bytes" if units[..., COLUMNS.index("n_bytes")].any() else "n_tokens")
    if (units[..., size] != units[:1, :1, :, size]).any():
        return None, "scored on different documents: judged by seeds alone"
    if not units[..., COLUMNS.index(RATIOS[metric][1])].sum(2).all():
        return None, "the sums by document show nothing scored: judged by seeds alone"
    return units, None


def unit_table(record: Record) -> Floats | None:
    """(n c) sums of each document of a ``quality`` record, a column a field of ``Totals``; None where it has none, or none that
    are ``n_documents`` finite numbers."""
    units: Any = record.get("units")
    n = record.get("n_documents")
    if not isinstance(units, Mapping) or not isinstance(n, int) or n < 1 or any(name not in units for name in COLUMNS):
        return None
    try:
        columns = [np.broadcast_to(np.asarray(units[name], dtype=np.float64), (n,)) for name in COLUMNS]
    except (TypeError, ValueError):
        return None
    table: Floats = np.stack(columns, axis=1)
    return table if np.isfinite(table).all() else None


def _of_seeds(values: Floats) -> float:
    """The variance of the mean of differences (s); 0 of one, which shows none."""
    return float(values.var(ddof=1)) / len(values) if len(values) > 1 else 0.0


def _of_documents(metric: str, units: Floats) -> tuple[int, float]:
    """How many documents were scored, of ``units`` (2 s n c), and the variance that they give the mean difference; 0 of one.

    A score is a ratio of sums over documents. What a document adds to it, to first order, is its own numerator less the score
    times its own denominator, over the sum of the denominators.
    """
    over, under = (units[..., COLUMNS.index(name)] for name in RATIOS[metric][:2])  # [2 s n]
    total = under.sum(-1, keepdims=True)
    added = (over - over.sum(-1, keepdims=True) / total * under) / total * RATIOS[metric][2]
    n = int((under > 0).any((0, 1)).sum())
    by_document = (added[0] - added[1]).mean(0)  # [n]
    return n, float((by_document**2).sum()) * n / (n - 1) if n > 1 else 0.0


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
    return found
