"""Quality against what it costs: points, which of them nobody beats in both, and scores by learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hybridtf.report import evidence as ev
from hybridtf.report import failures
from hybridtf.report.chart_data import interval
from hybridtf.report.tables import STATE_LENGTHS

Row: TypeAlias = dict[str, Any]


def state_rows(evidence: ev.Evidence, measure: ev.Measure | None) -> list[Row]:
    """By state: ``recipe value low high seeds record length cost`` (bytes), one row for each state length.

    A recipe without any state has no place on a logarithmic axis and is left out.
    """
    rows: list[Row] = []
    for subject in evidence.subjects:
        score = ev.quality(subject, measure)
        for length in STATE_LENGTHS:
            size = ev.state_bytes(subject, length)
            if score is not None and size is not None and size.value > 0:
                rows.append({"recipe": subject.label, **interval(score), "length": length, "cost": size.value})
    return rows


def flops_rows(evidence: ev.Evidence, measure: ev.Measure | None) -> list[Row]:
    """By the operations of the training that gave the score: ``recipe value low high seeds record cost``."""
    rows: list[Row] = []
    for subject in evidence.subjects:
        score = ev.quality(subject, measure)
        trainings = [r for r in subject.of("train") if _gave(r, subject, measure)]
        cost = ev.over_seeds([ev.number(r, "flops") for r in trainings])
        if score is not None and cost is not None and cost.value > 0:
            rows.append({"recipe": subject.label, **interval(score), "cost": cost.value})
    return rows


def decode_rows(evidence: ev.Evidence, measure: ev.Measure | None) -> list[Row]:
    """By seconds a decoded token, at the condition that most recipes have: ``recipe value low high seeds record cost``."""
    rows: list[Row] = []
    condition = evidence.condition("speed", "decode")
    for subject in evidence.subjects:
        score, rate = ev.quality(subject, measure), ev.speed(subject, "decode", condition)
        if score is not None and rate is not None and rate.value > 0:
            rows.append({"recipe": subject.label, **interval(score), "cost": 1 / rate.value})
    return rows


def _gave(training: ev.Record, subject: ev.Subject, measure: ev.Measure | None) -> bool:
    """Whether a training is behind the scores: of the task, and of the learning rate that was chosen."""
    if measure is None or training.get("task") not in (None, measure.task):
        return False
    rates = {repr(r.get("lr")) for r in ev.scored(subject, measure)}
    return training.get("lr") is None or rates == {"None"} or repr(training["lr"]) in rates


def front(rows: Sequence[Row], higher_is_better: bool) -> list[Row]:
    """The rows that no other one beats (as good in score and cost, and better in one), from the cheapest on."""
    sign = -1.0 if higher_is_better else 1.0

    def beats(one: Row, two: Row) -> bool:
        a, b = (one["cost"], sign * one["value"]), (two["cost"], sign * two["value"])
        return a != b and a[0] <= b[0] and a[1] <= b[1]

    return sorted((row for row in rows if not any(beats(other, row) for other in rows)), key=lambda row: row["cost"])


@dataclass(frozen=True)
class Sweep:
    """Scores by learning rate on one task. ``rows``: ``recipe lr value low high seeds record chosen``; ``left_out``: what has
    no score, and why."""

    measure: ev.Measure
    rows: list[Row]
    left_out: list[str]


def sweeps(evidence: ev.Evidence) -> list[Sweep]:
    """One for each task on which a recipe was tried with more than one learning rate: on the rows that rates are chosen by
    where they are recorded, else on those that were held out."""
    kind = "sweep" if any(s.of("sweep") for s in evidence.subjects) else "quality"
    records = [r for s in evidence.subjects for r in s.of(kind) if isinstance(r.get("metric"), str)]
    found = dict.fromkeys(
        ev.Measure(ev.task_of(r), ev.readable(r["metric"]), bool(r.get("higher_is_better"))) for r in records
    )
    return [sweep for measure in found if (sweep := _sweep(evidence, kind, measure)) is not None]


def _sweep(evidence: ev.Evidence, kind: str, measure: ev.Measure) -> Sweep | None:
    rows: list[Row] = []
    left_out: list[str] = []
    for subject in evidence.subjects:
        same = [r for r in subject.of(kind, metric=measure.metric) if ev.task_of(r) == measure.task]
        chosen = {ev.number(r, "chosen_lr") for r in subject.of("quality") if ev.task_of(r) == measure.task}
        rates = sorted({rate for r in same if (rate := ev.number(r, "lr")) is not None and rate > 0})
        for rate in rates if len(rates) > 1 else ():
            at = [r for r in same if ev.number(r, "lr") == rate]
            score = failures.told(ev.over_seeds([ev.number(r, "value") for r in at]), at)
            if isinstance(score, ev.Measured):
                rows.append({"recipe": subject.label, "lr": float(rate), **interval(score), "chosen": rate in chosen})
            elif score is not None:
                left_out.append(f"{subject.label} at {rate:g}: {score}")
    return Sweep(measure, rows, left_out) if rows else None


