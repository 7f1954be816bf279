"""All numbers behind the comparison: a row for each recipe and condition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hybridtf.bench.claims import ClaimError, long_context_claim, model_of
from hybridtf.report import evidence as ev
from hybridtf.report import failures, numbers
from hybridtf.report.fits_table import tried
from hybridtf.report.measured import REF
from hybridtf.report.table import Cell, Column, Table, exact

BRACKETS = (
    "Brackets around a speed: of one seed the spread between the quartiles of the repeats, of several the 95 % interval."
)

CHANCES = ("chance", "answer_chance", "row_chance")
"""What chance reaches, in a task's own metric: of tokens, answers or rows."""

SESSIONS = (
    "From {} measurements at different times: a machine may have been slower in one, so that only recipes that took turns in "
    "one measurement are compared, by their verdict."
)
VERDICTS = (
    "Verdict: ~ where the 99 % interval of the ratio holds 1, the difference is below the noise floor, or none is borne. "
    "The first is compared with itself: the control."
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
        Column("cold_tokens_per_s", "with cold caches", "rate"),
        Column("times_as_long", "time against the first", "score", True),
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
                    "cold_tokens_per_s": ev.over_seeds([_cold(r) for r in found]),
                    "times_as_long": ev.over_seeds(
                        [ev.number(r, "ratio", "time") for r in found], [_ratio_interval(r) for r in found]
                    ),
                    "verdict": _verdict(found),
                }
            )
    brackets = (BRACKETS,) if any(row["tokens_per_s"] for row in rows) else ()
    return Table("Speed", columns, tuple(rows), (*brackets, *_speed_notes(evidence, rows, "speed")))


def kernel_table(evidence: ev.Evidence) -> Table:
    """One row for each kernel that was timed on a call of a recipe."""
    columns = (
        Column("recipe", "recipe"),
        Column("op", "op"),
        Column("kernel", "kernel"),
        Column("phase", "phase"),
        Column("batch_size", "batch", "plain"),
        Column("length", "length (tokens)", "plain"),
        Column("median_us", "median (us)", "score", True),
        Column("cold_us", "with cold caches (us)", "score"),
        Column("times_as_long", "time against the first", "score", True),
        Column("verdict", "verdict"),
    )
    rows: list[dict[str, Cell]] = []
    for subject in evidence.subjects:
        for r in subject.of("kernel"):
            rows.append(
                {
                    "recipe": subject.label,
                    **{name: str(r.get(name)) for name in ("op", "kernel", "phase")},
                    "batch_size": exact(ev.number(r, "batch_size")),
                    "length": exact(ev.number(r, "length")),
                    "median_us": _us(r),
                    "cold_us": exact(_micro(ev.number(r, "cold", "median_s"))),
                    "times_as_long": ev.over_seeds([ev.number(r, "ratio", "time")], [_ratio_interval(r)]),
                    "verdict": _verdict([r]),
                }
            )
    brackets = ("Brackets around a time: from 20 to 80 of 100 rounds.",) if rows else ()
    return Table("Kernels", columns, tuple(rows), (*brackets, *_speed_notes(evidence, rows, "kernel")))


def _us(record: ev.Record) -> Cell:
    """The median with the points at 20 and 80 % around it; where there is none, the word for why."""
    low, high = (_micro(ev.number(record, name)) for name in ("p20_s", "p80_s"))
    bounds = None if low is None or high is None else (low, high)
    return failures.told(ev.over_seeds([_micro(ev.number(record, "median_s"))], [bounds]), [record])


def _micro(seconds: float | None) -> float | None:
    return None if seconds is None else 1e6 * seconds


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
    """One row for each recipe, task, protocol and length: every figure beside the trained length and the ratio to it."""
    columns = (
        Column("recipe", "recipe"),
        Column("task", "task"),
        Column("protocol", "read as"),
        Column("trained_length", "trained length (tokens)", "plain", short="trained at"),
        Column("length", "length (tokens)", "plain", short="length"),
        Column("ratio", "times the trained length", short="ratio"),
        Column("bits_per_byte", "bits/byte (95 %)", "score", True, short="b/byte"),
        Column("accuracy", "accuracy (95 %)", "score", True, short="accuracy"),
        Column("answer_accuracy", "answers right (95 %)", "score", True, short="answers right"),
        Column("row_accuracy", "rows right (95 %)", "score", True, short="rows right"),
        Column("chance", "chance", "score"),
        Column("n_units", "documents or rows", "plain", short="n"),
        Column("result", "result"),
    )
    rows: list[dict[str, Cell]] = []
    for subject in evidence.subjects:
        for (task, protocol, trained, length), found in _lengths(subject).items():
            rows.append(
                {
                    "recipe": subject.label,
                    "task": task,
                    "protocol": protocol,
                    "trained_length": exact(trained),
                    "length": exact(length),
                    "ratio": f"{length / trained:,.6g}x",
                    "bits_per_byte": _over_seeds(found, "bits_per_byte", "interval"),
                    "accuracy": _over_seeds(found, "accuracy", "interval"),
                    "answer_accuracy": _over_seeds(found, "answer_accuracy", "answer_interval"),
                    "row_accuracy": _over_seeds(found, "row_accuracy", "row_interval"),
                    "chance": next(filter(None, (_over_seeds(found, name) for name in CHANCES)), None),
                    "n_units": _over_seeds(found, "n_rows") or _over_seeds(found, "n_documents"),
                    "result": ", ".join(dict.fromkeys(failures.ended(e.get("result", "not_run")) for e in found)),
                }
            )
    found_notes = [(s.label, note) for s in evidence.subjects for r in s.of("extrapolation") for note in _warnings(r)]
    notes = [f"{label}: {note}" for label, note in dict.fromkeys(found_notes)]
    return Table("Longer than trained", columns, tuple(rows), (*notes, *long_row_claims(evidence)))


def long_row_claims(evidence: ev.Evidence) -> list[str]:
    """One sentence for each model that was measured on drawn rows, in its runs on one task or several: what it may be said to
    read, or why nothing may."""
    models: dict[str, list[ev.Record]] = {}
    labels: dict[str, list[str]] = {}
    for subject in evidence.subjects:
        for record in subject.of("extrapolation", protocol="rows"):
            models.setdefault(model_of(record), []).append(record)
            labels.setdefault(model_of(record), []).append(subject.label)
    said = []
    for model, records in models.items():
        names = " and ".join(dict.fromkeys(labels[model]))
        try:
            said.append(f"{names}: {long_context_claim(records)}.")
        except ClaimError as reason:
            said.append(f"{names}: {reason}.")
    return said


def _lengths(subject: ev.Subject) -> dict[tuple[str, str, int, int], list[ev.Record]]:
    """What each seed measured, by task, protocol, trained length and length."""
    out: dict[tuple[str, str, int, int], list[ev.Record]] = {}
    for record in subject.of("extrapolation"):
        trained = ev.number(record, "trained_length")
        for entry in record.get("by_length") or _by_multiple(record):
            length = ev.number(entry, "length")
            if trained and length:
                key = (str(record.get("task")), str(record.get("protocol", "documents")), int(trained), int(length))
                out.setdefault(key, []).append({**entry, REF: record.get(REF)})
    return out


def _by_multiple(record: ev.Record) -> list[ev.Record]:
    """The same of a record that is older than ``by_length``: what was scored was documents."""
    bits, spreads = ev.by_multiple(record, "bits_per_byte"), ev.by_multiple(record, "interval")
    n, trained = record.get("n_documents"), ev.number(record, "trained_length") or 0
    return [
        {
            "length": m * trained, "bits_per_byte": value, "interval": spreads.get(m), "n_documents": n,
            "result": "not_run" if value is None else "ok",
        }
        for m, value in bits.items()
    ]


def _over_seeds(entries: list[ev.Record], name: str, interval: str | None = None) -> ev.Measured | None:
    spreads = [ev.pair(entry.get(interval)) for entry in entries] if interval else None
    return ev.over_seeds([ev.number(entry, name) for entry in entries], spreads)


def _warnings(record: ev.Record) -> list[str]:
    """The record's note, and where the model collapsed."""
    collapse = record.get("collapse")
    told = []
    if isinstance(collapse, dict):
        told.append(f"collapsed at {collapse['length']} tokens ({collapse['ratio']:g}x the trained length): {collapse['why']}")
    return [*told, *([note] if (note := _note(record)) else [])]


def _cold(record: ev.Record) -> float | None:
    """Tokens a second of the median run with cold caches."""
    tokens, seconds = ev.number(record, "tokens"), ev.number(record, "cold", "median_s")
    return None if tokens is None or not seconds else tokens / seconds


def _ratio_interval(record: ev.Record) -> tuple[float, float] | None:
    ratio = record.get("ratio")
    return ev.pair(ratio.get("interval")) if isinstance(ratio, Mapping) else None


def _verdict(found: Sequence[ev.Record]) -> str | None:
    """faster, slower or ~, as recorded; of several seeds only what all of them say. Older records have none."""
    said = [ratio["verdict"] for r in found if isinstance(ratio := r.get("ratio"), Mapping) and ratio.get("verdict")]
    if not said:
        return None
    return str(said[0]) if len(set(said)) == 1 else "~"


def _speed_notes(evidence: ev.Evidence, rows: Sequence[dict[str, Cell]], kind: str) -> list[str]:
    """What signs mean, each run's noise, and why something is no claim or was not timed."""
    notes = [VERDICTS] if any(row["verdict"] for row in rows) else []
    reasons: dict[str, list[str]] = {}
    sessions = {record["session"] for subject in evidence.subjects for record in subject.of(kind) if record.get("session")}
    if len(sessions) > 1:
        notes.append(SESSIONS.format(len(sessions)))
    for subject in evidence.subjects:
        for record in subject.of(kind):
            phase = str(record.get("phase"))
            notes.append(_noise(record, phase))
            where = f"{subject.label}, {phase}" if kind == "speed" else str(record.get("kernel"))
            ratio = record.get("ratio")
            for of, what in ((record, ""), (ratio, "no verdict: ")):
                found = of.get("refused") if isinstance(of, Mapping) else None
                for reason in found if isinstance(found, list) else []:
                    reasons.setdefault(f"{what or 'no claim: '}{reason}", []).append(where)
            if record.get("note"):
                reasons.setdefault(_note(record), []).append(where)
    return [note for note in dict.fromkeys(notes) if note] + [
        f"{'; '.join(dict.fromkeys(places))}: {reason}." for reason, places in reasons.items()
    ]


def _noise(record: ev.Record, phase: str) -> str:
    """The run's noise floor, and what it could have shown."""
    floor, detectable = ev.number(record, "noise", "floor"), ev.number(record, "noise", "detectable")
    rounds = ev.number(record, "noise", "rounds")
    if floor is None or detectable is None or rounds is None:
        return ""
    return (
        f"Noise of {phase}: the same code twice agrees with a difference of {numbers.digits(100 * floor, None, 2)} %; "
        f"{rounds:.0f} rounds of it show one of {numbers.digits(100 * detectable, None, 2)} % in 95 of 100 runs."
    )


def _share(record: ev.Record) -> float | None:
    """Per cent of the machine's own matrix rate."""
    rate, limit = ev.number(record, "flops_per_s"), ev.number(record, "floor", "matrix_flops_per_s")
    return None if rate is None or not limit else 100 * rate / limit


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


