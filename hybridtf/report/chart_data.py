"""The points of every chart, as plain rows: what is not in a record is not in the rows either."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from hybridtf.report import evidence as ev
from hybridtf.report.measured import REF
from hybridtf.report.tables import STATE_LENGTHS

Row: TypeAlias = dict[str, Any]

MEMORY_KINDS = ("weights", "gradients", "optimizer", "activations", "state")
MAX_CURVE_POINTS = 300
"""Points a line: more cannot be told apart on a screen, and every one is stored in the page."""


def curve_rows(evidence: ev.Evidence) -> list[Row]:
    """Training loss: ``recipe seed tokens loss steps``; each point is the mean of ``steps`` neighbouring ones."""
    rows: list[Row] = []
    for subject in evidence.subjects:
        for record in subject.of("train"):
            points = [p for p in map(_curve_point, items(record.get("curve"))) if p is not None]
            per = max(1, math.ceil(len(points) / MAX_CURVE_POINTS))
            for start in range(0, len(points), per):
                part = points[start : start + per]
                rows.append(
                    {
                        "recipe": subject.label,
                        "seed": str(record.get("seed")),
                        "tokens": part[-1][0],
                        "loss": math.fsum(loss for _, loss in part) / len(part),
                        "steps": len(part),
                        "record": record[REF],
                    }
                )
    return rows


def quality_rows(evidence: ev.Evidence, measure: ev.Measure | None) -> list[Row]:
    """The held-out score on a task: ``recipe value low high seeds record``."""
    found = [(s.label, ev.quality(s, measure)) for s in evidence.subjects]
    return [{"recipe": label, **interval(score)} for label, score in found if score is not None]


def baseline_rows(evidence: ev.Evidence, measure: ev.Measure | None) -> list[Row]:
    """What the best trivial model reaches on that task: ``name value``."""
    name = evidence.baseline(measure)
    scores = [score for s in evidence.subjects if (score := ev.baseline(s, measure, name)) is not None]
    return [] if name is None or not scores else [{"name": name.replace("_", " "), "value": scores[0].value}]


def length_rows(evidence: ev.Evidence) -> list[Row]:
    """Bits per byte by multiple of the trained length: ``recipe multiple length value low high seeds``."""
    rows: list[Row] = []
    for subject in evidence.subjects:
        multiples = sorted(
            {m for r in subject.of("extrapolation") for m in ev.by_multiple(r, "bits_per_byte") if m > 0}
        )
        length = ev.trained_length(subject)
        for multiple in multiples:
            score = ev.at_multiple(subject, multiple)
            if score is not None:
                tokens = None if length is None else int(multiple * length)
                rows.append({"recipe": subject.label, "multiple": multiple, "length": tokens, **interval(score)})
    return rows


def position_rows(evidence: ev.Evidence) -> list[Row]:
    """Loss by position, the mean over seeds weighted by tokens: ``recipe position first last nats tokens``."""
    rows: list[Row] = []
    for subject in evidence.subjects:
        sums: dict[int, tuple[float, float]] = {}
        for record in subject.of("extrapolation"):
            for item in items(record.get("by_position")):
                start, nats, n = (ev.finite(value) for value in item) if len(item) == 3 else (None, None, None)
                if start is not None and nats is not None and n:
                    total, count = sums.get(int(start), (0.0, 0.0))
                    sums[int(start)] = (total + nats * n, count + n)
        starts, names = sorted(sums), named([str(r[REF]) for r in subject.of("extrapolation")])
        for i, start in enumerate(starts):
            # The last bucket is as wide as the one before it: its end is not in the record.
            end = starts[i + 1] if i + 1 < len(starts) else start + (start - starts[i - 1] if i else 1)
            total, count = sums[start]
            rows.append(
                {
                    "recipe": subject.label,
                    "position": (start + end) / 2,
                    "first": start,
                    "last": end - 1,
                    "nats": total / count,
                    "tokens": int(count),
                    "record": names,
                }
            )
    return rows


def speed_rows(evidence: ev.Evidence, phase: str) -> list[Row]:
    """Tokens a second in ``phase``: ``recipe batch_size length value low high seeds``."""
    rows: list[Row] = []
    for subject in evidence.subjects:
        conditions = {c for r in subject.of("speed", phase=phase) if (c := ev.condition_of(r)) is not None}
        for condition in sorted(conditions):
            rate = ev.speed(subject, phase, condition)
            if rate is not None:
                rows.append(
                    {"recipe": subject.label, "batch_size": condition[0], "length": condition[1], **interval(rate)}
                )
    return rows


def memory_rows(evidence: ev.Evidence, phase: str) -> list[Row]:
    """Memory by kind at the condition that most recipes have: ``recipe kind order bytes``."""
    return [
        {"recipe": subject.label, "kind": kind, "order": order, "bytes": size.value, "record": named(size.sources)}
        for subject in evidence.subjects
        for order, kind in enumerate(MEMORY_KINDS)
        if (size := _memory(evidence, subject, phase, kind)) is not None
    ]


def peak_rows(evidence: ev.Evidence, phase: str) -> list[Row]:
    """The measured peak at the same condition: ``recipe bytes``."""
    return [
        {"recipe": subject.label, "bytes": size.value, "record": named(size.sources)}
        for subject in evidence.subjects
        if (size := _memory(evidence, subject, phase, "peak")) is not None
    ]


def state_rows(evidence: ev.Evidence) -> list[Row]:
    """State of one sequence by the tokens it has read: ``recipe length bytes``."""
    rows: list[Row] = []
    for subject in evidence.subjects:
        found = {n: size for n in STATE_LENGTHS if (size := ev.state_bytes(subject, n)) is not None}
        sizes = {n: (size.value, named(size.sources)) for n, size in found.items()}
        for record in subject.of("extrapolation"):
            length = ev.number(record, "trained_length")
            for multiple, item in ev.by_multiple(record, "state_bytes").items():
                n_bytes = ev.finite(item)
                if length is not None and n_bytes is not None:
                    sizes[int(multiple * length)] = (n_bytes, record[REF])
        # Neither nothing read nor nothing kept has a place on a logarithmic axis.
        lengths = [n for n in sorted(sizes) if n > 0 and sizes[n][0] > 0]
        rows += [{"recipe": subject.label, "length": n, "bytes": sizes[n][0], "record": sizes[n][1]} for n in lengths]
    return rows


def _memory(evidence: ev.Evidence, subject: ev.Subject, phase: str, part: str) -> ev.Measured | None:
    condition = evidence.condition("memory", phase)
    found = [r for r in subject.of("memory", phase=phase) if ev.condition_of(r) == condition]
    return ev.over_seeds([ev.number(r, part) for r in found])


def interval(score: ev.Measured) -> Row:
    """A score as the fields of a point: ``value``, the ends ``low`` and ``high`` of its interval (the value itself where it has
    none), ``seeds`` (how many) and ``record``."""
    low = score.value if score.low is None else score.low
    high = score.value if score.high is None else score.high
    return {"value": score.value, "low": low, "high": high, "seeds": score.n_seeds, "record": named(score.sources)}


def named(sources: Sequence[str]) -> str:
    """The records that a point comes from, for its tooltip: the first by name, the others by their number."""
    return "" if not sources else sources[0] if len(sources) == 1 else f"{sources[0]} and {len(sources) - 1} more"


def items(value: Any) -> list[Sequence[Any]]:
    """The lists in ``value``; nothing where it is no list."""
    return [item for item in value if isinstance(item, list | tuple)] if isinstance(value, list | tuple) else []


def _curve_point(item: Sequence[Any]) -> tuple[float, float] | None:
    tokens, loss = (ev.finite(item[1]), ev.finite(item[2])) if len(item) >= 3 else (None, None)
    return None if tokens is None or loss is None else (tokens, loss)
