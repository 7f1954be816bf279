"""The comparison: one row a recipe, with what decides between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hybridtf.report import evidence as ev
from hybridtf.report import failures, numbers
from hybridtf.report.table import Cell, Column, Table

STATE_LENGTHS = (1024, 65536)
MULTIPLES = (1, 4, 16)

BIGRAM = "a model that only counts pairs of bytes, on the same text"

WINDOWS = (
    "Held-out bits/byte and bits/byte at 1x differ: the first reads all that was scored in windows that move by half a "
    "window, the second documents from their start with the state carried."
)
"""Why two columns that sound alike do not agree."""


def compare_table(records: Iterable[ev.Record]) -> Table:
    """One row a recipe: size, held-out quality beside the best trivial model, speeds, peak memory, state sizes, longer
    texts or the kinds of rows that the task tells apart."""
    return compare(ev.gather(records))


def compare(evidence: ev.Evidence) -> Table:
    """:func:`compare_table` of records that were gathered already."""
    measure, others = evidence.measure(), evidence.measures()[1:]
    trivial, groups = evidence.baseline(measure), evidence.groups(measure)
    train, decode = evidence.condition("speed", "train"), evidence.condition("speed", "decode")
    peak = evidence.condition("memory", "train")
    rows = []
    for subject in evidence.subjects:
        score = ev.quality(subject, measure)
        row: dict[str, Cell] = {
            "recipe": subject.label, "n_params": subject.n_params, "n_seeds": _n_seeds(subject, score),
            "train_tokens_per_s": failures.told(ev.speed(subject, "train", train), ev.timed(subject, "train", train)),
            "decode_tokens_per_s": failures.told(ev.speed(subject, "decode", decode), ev.timed(subject, "decode", decode)),
            "peak_train_bytes": _peak(subject, "train", peak),
        }
        row |= {f"state_bytes_{n}": ev.state_bytes(subject, n) for n in STATE_LENGTHS}
        row |= {f"bits_per_byte_{m}x": ev.at_multiple(subject, m) for m in MULTIPLES}
        if measure is not None:
            row[measure.metric] = _score(subject, measure)
            row[f"{trivial}_{measure.metric}"] = ev.baseline(subject, measure, trivial)
            row |= {f"{measure.metric}: {group}": ev.in_group(subject, measure, group) for group in groups}
        row |= {_other_key(other): _score(subject, other) for other in others}
        rows.append(row)
    notes = (*_conditions(evidence, measure, train, decode, peak), *evidence.notes)
    columns = _columns(measure, trivial, groups, others) + (_multiple_columns() if evidence.reads_texts() else ())
    return Table("Comparison", columns, tuple(rows), notes, failures.NOT_RUN)


def compare_by_task(evidence: ev.Evidence) -> list[Table]:
    """:func:`compare`, in a table for each task where recipes were trained on different ones: only those of one task compare.
    What no record says a task of stands in the first."""
    homes = [_home(subject) for subject in evidence.subjects]
    tasks = list(dict.fromkeys(task for task in homes if task is not None))
    if len(tasks) < 2:
        return [compare(evidence)]
    tables = []
    for place, task in enumerate(tasks):
        own = [s for s, home in zip(evidence.subjects, homes, strict=True) if home == task or (home is None and place == 0)]
        part = ev.Evidence(tuple(own), evidence.notes if place == 0 else ())
        tables.append(replace(compare(part), title=f"Comparison: {task}"))
    return tables


def _home(subject: ev.Subject) -> str | None:
    """The task that a recipe was trained on: the first that its records name."""
    return next((ev.task_of(r) for r in subject.records if r.get("task") is not None), None)


def _score(subject: ev.Subject, measure: ev.Measure) -> Cell:
    return ev.quality_outcome(subject, measure) or ev.quality(subject, measure)


def _n_seeds(subject: ev.Subject, score: ev.Measured | None) -> ev.Measured:
    """The seeds behind the score, whose records the number leads to; without a score those of all records."""
    return ev.Measured(float(score.n_seeds if score else subject.n_seeds), sources=score.sources if score else ())


def _other_key(measure: ev.Measure) -> str:
    return f"{measure.task}: {measure.metric}"


def _other_columns(measures: list[ev.Measure]) -> tuple[Column, ...]:
    """The tasks that fewer recipes were scored on, a column each."""
    return tuple(
        Column(
            _other_key(m), f"{m.task}, held-out {m.head} (95 %)", "score", with_interval=True, short=f"{m.task}\n{m.head}",
            explanation=f"on what was held out of {m.task}; {m.better}",
        )
        for m in measures
    )


def _score_columns(measure: ev.Measure | None, trivial: str | None) -> tuple[Column, ...]:
    if measure is None:
        return ()
    text = measure.metric == "bits_per_byte"
    what = "on text that was not trained on" if text else f"on rows of {measure.task} that were not trained on"
    score = Column(
        measure.metric, f"held-out {measure.head} (95 %)", "score", with_interval=True, short=f"held-out\n{measure.head}",
        explanation=f"{what}; {measure.better}",
    )
    if trivial is None:
        return (score,)
    name = trivial.replace("_", " ")
    explanation = BIGRAM if trivial == "bigram" else f"the best of the trivial models, {name!r}, on the same rows"
    return score, Column(
        f"{trivial}_{measure.metric}", f"{name} {measure.head}", "score", short=name.replace(" ", "\n"),
        explanation=explanation,
    )


def _group_columns(measure: ev.Measure | None, groups: list[str]) -> tuple[Column, ...]:
    if measure is None:
        return ()
    return tuple(
        Column(
            f"{measure.metric}: {group}", f"{measure.head}, {group}", "score", short=group.replace(", ", "\n"),
            explanation=f"on the rows of {group} alone",
        )
        for group in groups
    )


def _columns(
    measure: ev.Measure | None, trivial: str | None, groups: list[str], others: list[ev.Measure]
) -> tuple[Column, ...]:
    states = (
        Column(
            f"state_bytes_{n}", f"state at {n // 1024}k tokens", "bytes", short=f"state\n{n // 1024}k",
            explanation=f"what one sequence carries after {n} tokens",
        )
        for n in STATE_LENGTHS
    )
    return (
        Column("recipe", "recipe"),
        Column("n_params", "params", "count", explanation="trained numbers in the model"),
        Column("n_seeds", "seeds", "plain", explanation="behind the held-out score; without one, in all records"),
        *_score_columns(measure, trivial),
        *_group_columns(measure, groups),
        *_other_columns(others),
        Column(
            "train_tokens_per_s", "training", "rate", short="train",
            explanation="training steps, forward to optimizer; higher is better",
        ),
        Column("decode_tokens_per_s", "decode", "rate", explanation="one token at a time; higher is better"),
        Column(
            "peak_train_bytes", "peak training memory", "bytes", short="peak\nmem.",
            explanation="the most memory at any time of a training step",
        ),
        *states,
    )


def _multiple_columns() -> tuple[Column, ...]:
    return tuple(
        Column(
            f"bits_per_byte_{m}x", f"bits/byte at {m}x", "score", short=f"b/byte\n{m}x",
            explanation=f"up to {m} times the trained length; lower is better",
        )
        for m in MULTIPLES
    )


def _peak(subject: ev.Subject, phase: str, condition: ev.Condition | None) -> Cell:
    found = [r for r in subject.of("memory", phase=phase) if condition is not None and ev.condition_of(r) == condition]
    return failures.told(ev.over_seeds([ev.number(r, "peak") for r in found]), found)


def _conditions(
    evidence: ev.Evidence,
    measure: ev.Measure | None,
    train: ev.Condition | None,
    decode: ev.Condition | None,
    peak: ev.Condition | None,
) -> list[str]:
    """Under which conditions the columns of the comparison were measured, in whole sentences."""
    parts = []
    if measure is not None:
        parts.append(f"Held out: {measure.task} (95 % interval in brackets).")
    if train is not None:
        parts.append(f"Training speed: batch {train[0]} x {numbers.thousands(train[1])} tokens.")
    if decode is not None:
        parts.append(f"Decode: batch {decode[0]} after a prompt of {numbers.thousands(decode[1])} tokens.")
    if peak is not None:
        parts.append(f"Peak memory: batch {peak[0]} x {numbers.thousands(peak[1])} tokens.")
    lengths = {n for s in evidence.subjects if (n := ev.trained_length(s)) is not None}
    if lengths:
        parts.append(f"Trained length (1x): {' or '.join(numbers.thousands(n) for n in sorted(lengths))} tokens.")
    notes = [" ".join([*parts, f"1 kB = {numbers.thousands(1000)} bytes."])]
    if measure is not None and lengths:
        notes.append(WINDOWS)
    return notes
