"""The longest lengths that were found by trial: an interval, how its upper end failed, and how sure its lower end is."""

from __future__ import annotations

from hybridtf.report import evidence as ev
from hybridtf.report import numbers
from hybridtf.report.table import Cell, Column, Table, exact

NOTE = (
    "Fits: ran to its end in a fresh process, in memory and in time, with finite results, twice where confirmed. "
    "Limits count what a process takes beyond its libraries; predictions of the memory table count tensors alone."
)


def fits_table(evidence: ev.Evidence) -> Table:
    """One row for each recipe, phase, batch size and limit that was searched."""
    columns = (
        Column("recipe", "recipe"),
        Column("phase", "phase"),
        Column("batch_size", "batch", "plain"),
        Column("limit_bytes", "limit", "bytes"),
        Column("fits", "fits (tokens)", "plain"),
        Column("fails", "fails (tokens)", "plain"),
        Column("why", "why"),
        Column("confirmed", "confirmed"),
        Column("trials", "trials", "plain"),
    )
    rows = tuple(_row(subject.label, record) for subject in evidence.subjects for record in subject.of("fits"))
    return Table("Longest that fits", columns, rows, (NOTE,) if rows else ())


def _row(label: str, record: ev.Record) -> dict[str, Cell]:
    probes = record.get("probes")
    return {
        "recipe": label,
        "phase": str(record.get("phase")),
        "batch_size": exact(ev.number(record, "batch_size")),
        "limit_bytes": exact(ev.number(record, "limit_bytes")),
        "fits": exact(ev.number(record, "fits")) or f"none: {why(record)}",
        "fails": exact(ev.number(record, "fails", "length")) or "none tried",
        "why": why(record) or "nothing failed",
        "confirmed": "yes" if record.get("confirmed") else "no",
        "trials": exact(len(probes) if isinstance(probes, list) else None),
    }


def why(record: ev.Record) -> str | None:
    """How the upper end of the interval failed, in words; None where nothing failed."""
    fails = record.get("fails")
    return outcome_words(fails.get("outcome")) if isinstance(fails, dict) else None


def outcome_words(outcome: object) -> str:
    """An outcome as people read it: out of memory, timed out, non finite and failed stay four answers."""
    return str(outcome).replace("_", " ")


def tried(record: ev.Record) -> str | None:
    """The interval in one line: ``3,391 to 3,440 tokens in 2.00 GB (out of memory)``."""
    fits, limit = ev.number(record, "fits"), ev.number(record, "limit_bytes")
    if limit is None:
        return None
    end = ev.number(record, "fails", "length")
    words = f" in {numbers.in_bytes(limit)}" + (f" ({why(record)})" if why(record) else "")
    if fits is None:
        return f"no length{words}"
    length = f"at least {numbers.thousands(fits)}" if end is None else f"{numbers.thousands(fits)} to {numbers.thousands(end)}"
    return f"{length} tokens{words}"
