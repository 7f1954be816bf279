"""All numbers behind the comparison: a row for each recipe and condition."""

from __future__ import annotations

from hybridtf.report import evidence as ev
from hybridtf.report import numbers
from hybridtf.report.fits_table import outcome_words, tried
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
                    "tokens_per_s": ev.speed(subject, phase, condition),
                    "matrix_share": ev.over_seeds([_share(r) for r in found]),
                    "times_as_long": ev.over_seeds([ev.number(r, "ratio", "time") for r in found]),
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
        Column("state_used", "state in use", "bytes"),
        Column("rest", "rest of the process or allocator", "bytes"),
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
                "longest": _longest_of(subject, phase, condition[0], found),
                "state_used": ev.over_seeds([ev.number(r, "state_used") for r in found]),
                "rest": ev.over_seeds([_rest(r) for r in found]),
            }
            rows.append(row | {part: _bytes_or_word(found, part) for part in parts})
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
                    "score": score,
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


def _share(record: ev.Record) -> float | None:
    """Per cent of the machine's own matrix rate."""
    rate, limit = ev.number(record, "flops_per_s"), ev.number(record, "floor", "matrix_flops_per_s")
    return None if rate is None or not limit else 100 * rate / limit


def _bytes_or_word(records: list[ev.Record], part: str) -> Cell:
    """The bytes of ``part``; where one seed has none because of how it ended, that word and no mean of the others."""
    ended = [str(r["result"]) for r in records if r.get("result") not in (None, "ok")]
    if not ended:
        return ev.over_seeds([ev.number(r, part) for r in records])
    words = ", ".join(dict.fromkeys(map(outcome_words, ended)))
    return words if len(ended) == len(records) else f"{words} in {len(ended)} of {len(records)} seeds"


def _rest(record: ev.Record) -> float | None:
    """On a CPU the resident bytes beyond the counted ones, on a GPU those that its allocator held and did not use."""
    beyond = ev.number(record, "rest", "beyond_counted")
    return ev.number(record, "rest", "unused") if beyond is None else beyond


def _longest_of(subject: ev.Subject, phase: str, batch_size: int, found: list[ev.Record]) -> str | None:
    """What trials have found; else what was predicted."""
    trials = [tried(r) for r in subject.of("fits", phase=phase, batch_size=batch_size)]
    return next((text for text in (*trials, *map(_predicted, found)) if text), None)


def _predicted(record: ev.Record) -> str | None:
    longest = record.get("longest")
    limit = ev.number(longest, "limit_bytes")
    if not isinstance(longest, dict) or limit is None:
        return None
    length = ev.number(longest, "length")
    more = "at least " if longest.get("at_least") else ""
    tokens = f"{more}{numbers.thousands(length)} tokens" if length else "no length"
    return f"{tokens} in {numbers.in_bytes(limit)}" + (", predicted" if longest.get("predicted") else "")


def _note(record: ev.Record) -> str:
    note = record.get("note")
    return str(note) if note else ""


