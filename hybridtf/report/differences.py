"""Which recipe is better, pair by pair: the difference of scores under the same seeds, with its interval."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hybridtf.report import evidence as ev
from hybridtf.report.measured import REF
from hybridtf.report.table import Cell, Column, Table, exact

BETTER, WORSE, ALIKE, UNKNOWN = "better", "worse", "~", "unknown"

NOTE = (
    "Paired by seed: the mean of the differences under the same seed, with Student's 95 % interval. Of one seed: both "
    "intervals joined as if they were independent, which they are not where both read the same rows, so it is rather too wide."
)


@dataclass(frozen=True)
class Difference:
    """``recipe`` less ``other`` on one task. ``verdict``: of ``recipe``; ``~``: the interval holds zero; ``unknown``: a seed
    failed, none is shared, or nothing tells the interval."""

    recipe: str
    other: str
    difference: ev.Measured | None
    verdict: str


def pairwise(evidence: ev.Evidence, measure: ev.Measure) -> list[Difference]:
    """Every pair of the recipes that were scored on a task."""
    scored = [s for s in evidence.subjects if ev.scored(s, measure)]
    return [difference(one, two, measure) for one, two in itertools.combinations(scored, 2)]


def difference(one: ev.Subject, two: ev.Subject, measure: ev.Measure) -> Difference:
    """Two recipes on one task."""
    unknown = Difference(one.label, two.label, None, UNKNOWN)
    if ev.quality_outcome(one, measure) or ev.quality_outcome(two, measure):
        return unknown
    sides = [{repr(r.get("seed")): r for r in ev.scored(subject, measure)} for subject in (one, two)]
    pairs = [(record, sides[1][seed]) for seed, record in sides[0].items() if seed in sides[1]]
    values = [(ev.number(a, "value"), ev.number(b, "value")) for a, b in pairs]
    gaps = [a - b for a, b in values if a is not None and b is not None]
    found = ev.over_seeds(gaps, [_joined(*pairs[0])] if len(pairs) == 1 and gaps else None)
    if found is None:
        return unknown
    sources = tuple(str(r[REF]) for pair in pairs for r in pair)
    found = ev.Measured(found.value, found.low, found.high, found.n_seeds, sources)
    return Difference(one.label, two.label, found, _verdict(found, measure.higher_is_better))


def _joined(one: ev.Record, two: ev.Record) -> tuple[float, float] | None:
    """The interval of the difference of two independent numbers."""
    a, b = ev.pair(one.get("interval")), ev.pair(two.get("interval"))
    if a is None or b is None:
        return None
    gap = sum(a) / 2 - sum(b) / 2
    half = (((a[1] - a[0]) / 2) ** 2 + ((b[1] - b[0]) / 2) ** 2) ** 0.5
    return gap - half, gap + half


def _verdict(difference: ev.Measured, higher_is_better: bool) -> str:
    if difference.low is None or difference.high is None:
        return UNKNOWN
    if difference.low <= 0 <= difference.high:
        return ALIKE
    return BETTER if (difference.value > 0) == higher_is_better else WORSE


def difference_tables(evidence: ev.Evidence) -> list[Table]:
    """A table for each task on which at least two recipes were scored."""
    tables = []
    for measure in evidence.measures():
        found = pairwise(evidence, measure)
        columns = (
            Column("recipe", "recipe"),
            Column("other", "against"),
            Column("difference", f"difference in {measure.head} (95 %)", "score", True, f"of the first; {measure.better}"),
            Column("n_seeds", "seeds", "plain", explanation="that both have"),
            Column("verdict", "verdict on the first"),
        )
        rows: list[dict[str, Cell]] = [
            {
                "recipe": d.recipe, "other": d.other, "difference": d.difference, "verdict": d.verdict,
                "n_seeds": exact(d.difference.n_seeds if d.difference else None),
            }
            for d in found
        ]  # fmt: skip
        if rows:
            tables.append(Table(f"Differences on {measure.task}", columns, tuple(rows), (NOTE,)))
    return tables
