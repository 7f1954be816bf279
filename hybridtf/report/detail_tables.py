"""All numbers behind the comparison: a row for each recipe and condition."""

from __future__ import annotations

from collections.abc import Mapping

from hybridtf.report import differences, failures, numbers
from hybridtf.report import evidence as ev
from hybridtf.report.table import Cell, Column, Table, exact

BRACKETS = (
    "Brackets around a speed: of one seed the spread between the quartiles of the repeats, of several the 95 % interval."
)


def speed_table(evidence: ev.Evidence) -> Table:
    """One row for each recipe, phase and condition that was timed."""
    columns = (
        Column("recipe", "recipe"),
        Column("phase", "phase"),
        Column("batch_size", "batch", "plain"),
        Column("length", "length (tokens)", "plain"),
        Column("tokens_per_s", "speed", "rate", True),
        Column("matrix_share", "share of the matrix rate (%)", "score"),
        Column("times_as_long", "time against the first", "score"),
        Column("verdict", "verdict"),
    )
    rows: list[dict[str, Cell]] = []
    for subject in evidence.subjects:
        keys = {(str(r.get("phase")), c) for r in subject.of("speed") if (c := ev.condition_of(r)) is not None}
        for phase, condition in sorted(keys):
            found = [r for r in subject.of("speed", phase=phase) if ev.condition_of(r) == condition]
            rows.append(
                {
                    "recipe": subject.label,
                    "phase": phase,
                    "batch_size": exact(condition[0]),
                    "length": exact(condition[1]),
                    "tokens_per_s": failures.told(ev.speed(subject, phase, condition), found),
                    "matrix_share": ev.over_seeds([_share(r) for r in found]),
                    "times_as_long": ev.over_seeds([ev.number(r, "ratio", "time") for r in found]),
                    "verdict": _verdict(found),
                }
            )
    return Table("Speed", columns, tuple(rows), (BRACKETS,) if any(row["tokens_per_s"] for row in rows) else ())


def memory_table(evidence: ev.Evidence) -> Table:
    """One row for each recipe, phase and condition whose memory was counted."""
    parts = ("weights", "gradients", "optimizer", "activations", "state", "peak")
    columns = (
        Column("recipe", "recipe"),
        Column("phase", "phase"),
        Column("batch_size", "batch", "plain"),
        Column("length", "length (tokens)", "plain"),
        *(Column(part, part, "bytes") for part in parts),
        Column("longest", "longest that fits"),
    )
    rows: list[dict[str, Cell]] = []
    for subject in evidence.subjects:
        keys = {(str(r.get("phase")), c) for r in subject.of("memory") if (c := ev.condition_of(r)) is not None}
        for phase, condition in sorted(keys):
            found = [r for r in subject.of("memory", phase=phase) if ev.condition_of(r) == condition]
            row: dict[str, Cell] = {
                "recipe": subject.label,
                "phase": phase,
                "batch_size": exact(condition[0]),
                "length": exact(condition[1]),
                "longest": next((text for r in found if (text := _longest(r))), None),
            }
            counted = {part: ev.over_seeds([ev.number(r, part) for r in found]) for part in parts}
            rows.append(row | {part: failures.told(size, found) for part, size in counted.items()})
    return Table("Memory", columns, tuple(rows))


def quality_table(evidence: ev.Evidence) -> Table:
    """One row for each recipe and task that was scored, beside the best trivial model on the same data."""
    columns = (
        Column("recipe", "recipe"),
        Column("task", "task"),
        Column("n_seeds", "seeds", "plain"),
        Column("metric", "metric"),
        Column("score", "held-out score (95 %)", "score", True),
        Column("baseline", "best trivial model"),
        Column("baseline_score", "its score", "score"),
        Column("n_documents", "documents or rows", "plain"),
        Column("n_bytes", "text", "bytes"),
    )
    rows: list[dict[str, Cell]] = []
    for subject in evidence.subjects:
        for measure in ev.measures(subject):
            score, found = ev.quality(subject, measure), ev.scored(subject, measure)
            trivial = evidence.baseline(measure)
            rows.append(
                {
                    "recipe": subject.label,
                    "task": measure.task,
                    "n_seeds": exact(score.n_seeds if score else None),
                    "metric": f"{measure.words} ({measure.better})",
                    "score": ev.quality_outcome(subject, measure) or score,
                    "baseline": None if trivial is None else trivial.replace("_", " "),
                    "baseline_score": ev.baseline(subject, measure, trivial),
                    "n_documents": ev.over_seeds([ev.number(r, "n_documents") for r in found]),
                    "n_bytes": ev.over_seeds([ev.number(r, "n_bytes") for r in found]),
                }
            )
    return Table("Quality", columns, tuple(rows))


def extrapolation_table(evidence: ev.Evidence) -> Table:
    """One row a recipe, one column for each multiple of the trained length at which any of them was scored."""
    multiples = sorted(
        {m for s in evidence.subjects for r in s.of("extrapolation") for m in ev.by_multiple(r, "bits_per_byte")}
    )
    columns = (
        Column("recipe", "recipe"),
        Column("trained_length", "trained length (tokens)", "plain"),
        *(Column(f"bits_per_byte_{m:g}x", f"bits/byte at {m:g}x", "score", True) for m in multiples),
    )
    rows: list[dict[str, Cell]] = []
    for subject in evidence.subjects:
        if subject.of("extrapolation"):
            row: dict[str, Cell] = {"recipe": subject.label, "trained_length": exact(ev.trained_length(subject))}
            rows.append(row | {f"bits_per_byte_{m:g}x": ev.at_multiple(subject, m) for m in multiples})
    notes = [
        f"{s.label}: {note}"
        for s in evidence.subjects
        for note in dict.fromkeys(_note(r) for r in s.of("extrapolation"))
        if note
    ]
    return Table("Longer than trained", columns, tuple(rows), tuple(notes))


def _verdict(found: list[ev.Record]) -> str | None:
    """Of the ratio to the first, where all seeds have the same; ``~`` where they differ, or one is within the noise."""
    said = {r["ratio"].get("verdict") for r in found if isinstance(r.get("ratio"), Mapping)}
    return None if said <= {None} else said.pop() if len(said) == 1 else differences.ALIKE


def _share(record: ev.Record) -> float | None:
    """Per cent of the machine's own matrix rate."""
    rate, limit = ev.number(record, "flops_per_s"), ev.number(record, "floor", "matrix_flops_per_s")
    return None if rate is None or not limit else 100 * rate / limit


def _longest(record: ev.Record) -> str | None:
    longest = record.get("longest")
    length, limit = ev.number(longest, "length"), ev.number(longest, "limit_bytes")
    if length is None or limit is None:
        return None
    more = "at least " if isinstance(longest, dict) and longest.get("at_least") else ""
    tokens = f"{more}{numbers.thousands(length)} tokens" if length else "no length"
    return f"{tokens} in {numbers.in_bytes(limit)}"


def _note(record: ev.Record) -> str:
    note = record.get("note")
    return str(note) if note else ""


