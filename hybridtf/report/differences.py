"""Which recipe is better, pair by pair, as :func:`hybridtf.bench.differences.pairwise` has it of the records that count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybridtf.bench.differences import Difference
from hybridtf.bench.differences import pairwise as of_records
from hybridtf.report import evidence as ev
from hybridtf.report import failures
from hybridtf.report.measured import REF
from hybridtf.report.table import Cell, Column, Table, exact

NOTE = (
    "Intervals (95 %) of the paired difference: Student's, of the variance over seeds plus that over documents, for both "
    "recipes alike; few seeds or documents widen it. p is Holm's, over all pairs of the task; from 0.05 on the difference does "
    "not show: ~. One seed and fewer than 10 documents bear no verdict."
)


@dataclass(frozen=True)
class Pair:
    """Two recipes on one task, by label: what was found, and the number with the records behind it (None: unknown)."""

    found: Difference
    measured: ev.Measured | None


def pairwise(evidence: ev.Evidence, measure: ev.Measure) -> list[Pair]:
    """Every pair of the recipes that were scored on a task."""
    scored = {s.label: _of(s, measure) for s in evidence.subjects if ev.scored(s, measure)}
    pairs = []
    for found in of_records([record for records in scored.values() for record in records]):
        sides = [
            {r["seed"]: r for r in scored[name] if r["kind"] == "quality" and r["value"] is not None}
            for name in (found.recipe, found.other)
        ]
        seeds = [seed for seed in sides[0] if seed in sides[1]]
        sources = tuple(str(side[seed][REF]) for seed in seeds for side in sides)
        measured = None
        if found.value is not None:
            measured = ev.Measured(found.value, found.low, found.high, found.n_seeds, sources)
        pairs.append(Pair(found, measured))
    return pairs


def _of(subject: ev.Subject, measure: ev.Measure) -> list[dict[str, Any]]:
    """The scores of a recipe as records of its label, a seed by what it says, and a failed training where one has no score."""
    same = {"recipe": subject.label, "recipe_hash": None, "task": measure.task, "metric": measure.metric}
    out: list[dict[str, Any]] = []
    for record in [*ev.scored(subject, measure), *ev.failed_trainings(subject, measure)]:
        why, value = failures.outcome(record), ev.number(record, "value")
        own = {**record, **same, "seed": repr(record.get("seed")), "higher_is_better": measure.higher_is_better}
        if record["kind"] == "quality":
            out.append({**own, "value": None if value is None else float(value)})
        if why is not None:
            out.append({**own, "kind": "train", "failed": why, "result": why})
    return out


def between(pairs: Sequence[Pair], one: str, two: str) -> Difference | None:
    """What was found of two recipes, as seen by the first; None where they are no pair."""
    turned = {"better": "worse", "worse": "better"}
    for found in (pair.found for pair in pairs):
        if (found.recipe, found.other) == (one, two):
            return found
        if (found.recipe, found.other) == (two, one):
            value, low, high = (None if x is None else -x for x in (found.value, found.high, found.low))
            verdict = turned.get(found.verdict, found.verdict)
            return replace(found, recipe=one, other=two, value=value, low=low, high=high, verdict=verdict)  # type: ignore[arg-type]
    return None


def difference_tables(evidence: ev.Evidence) -> list[Table]:
    """A table for each task on which at least two recipes were scored."""
    tables = []
    for measure in evidence.measures():
        columns = (
            Column("recipe", "recipe"),
            Column("other", "against"),
            Column("difference", f"difference in {measure.head} (95 %)", "score", True, f"of the first; {measure.better}"),
            Column("p", "p", explanation="two-sided, after Holm's correction"),
            Column("n_seeds", "seeds", "plain", explanation="that both have"),
            Column("n_documents", "documents or rows", "plain", explanation="that were scored; 0: seeds alone are judged"),
            Column("verdict", "verdict on the first"),
        )
        pairs = pairwise(evidence, measure)
        rows = tuple(_row(pair) for pair in pairs)
        if rows:
            tables.append(Table(f"Differences on {measure.task}", columns, rows, (NOTE, *_reasons(pairs))))
    return tables


def _row(pair: Pair) -> dict[str, Cell]:
    found, known = pair.found, pair.measured is not None
    return {
        "recipe": found.recipe, "other": found.other, "difference": pair.measured, "verdict": found.verdict,
        "p": None if found.p is None else f"{found.p:.3f}" if found.p >= 0.001 else "<0.001",
        "n_seeds": exact(found.n_seeds if known else None), "n_documents": exact(found.n_documents if known else None),
    }


def _reasons(pairs: Sequence[Pair]) -> list[str]:
    """What the pairs' notes say, each once, with the pairs that it is said of."""
    said: dict[str, list[str]] = {}
    for found in (pair.found for pair in pairs):
        if found.note:
            said.setdefault(found.note, []).append(f"{found.recipe} against {found.other}")
    return [f"{'all pairs' if len(on) == len(pairs) > 1 else '; '.join(on)}: {note}." for note, on in said.items()]
