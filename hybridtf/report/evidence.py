"""What the records say, recipe by recipe: which records count, and one number out of several seeds.

A report reads records and nothing else, and never guesses: a field that is missing, null or no number gives None, which
every table and chart shows as "not measured". Where a seed failed there is no mean over the others (``failures.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hybridtf.bench.differences import FEWEST_DOCUMENTS
from hybridtf.report import failures, sifting
from hybridtf.report.measured import Measured, Record, finite, number, over_seeds, pair, read
from hybridtf.report.sifting import readable

__all__ = [
    "Condition", "Evidence", "Measure", "Measured", "Record", "Subject", "at_multiple", "baseline", "by_multiple",
    "change_at_multiple", "condition_of", "failed_trainings", "finite", "gather", "in_group", "measures", "number",
    "over_seeds", "pair", "quality", "quality_outcome", "readable", "scored", "speed", "state_bytes", "task_of", "timed",
    "trained_length", "trained_lengths",
]  # fmt: skip

Condition: TypeAlias = tuple[int, int]
"""Batch size and length (tokens) at which a speed or a memory was measured."""


@dataclass(frozen=True)
class Measure:
    """What a task is scored by."""

    task: str
    metric: str
    higher_is_better: bool

    @property
    def words(self) -> str:
        """The metric in a sentence or on an axis."""
        return self.metric.replace("_", " ")

    @property
    def head(self) -> str:
        """The metric in the head of a column."""
        return self.metric.replace("_per_", "/").replace("_", " ")

    @property
    def better(self) -> str:
        """Which way is better, in words."""
        return "higher is better" if self.higher_is_better else "lower is better"

    def best(self, scores: Mapping[str, Measured]) -> str | None:
        """The name with the best score; None where there is none."""
        sign = -1 if self.higher_is_better else 1
        return min(scores, key=lambda name: sign * scores[name].value, default=None)


@dataclass(frozen=True)
class Subject:
    """One recipe: its label (unique in the report) and the records that count, in order."""

    label: str
    records: tuple[Record, ...]

    def of(self, kind: str, **fields: Any) -> list[Record]:
        """Its records of ``kind`` whose fields have these values."""
        return [
            r for r in self.records if r["kind"] == kind and all(r.get(name) == value for name, value in fields.items())
        ]

    def measured(self, kind: str, *path: str, **fields: Any) -> Measured | None:
        """The mean over the seeds of the number at ``path`` in its records of ``kind``."""
        return over_seeds([number(r, *path) for r in self.of(kind, **fields)])

    @property
    def n_params(self) -> Measured | None:
        """Parameters, the same in every record of a recipe."""
        counts = [n for n in (number(r, "n_params") for r in self.records) if n is not None]
        return over_seeds(counts[-1:])

    @property
    def n_seeds(self) -> int:
        """How many seeds its records have."""
        return len({repr(record.get("seed")) for record in self.records})


@dataclass(frozen=True)
class Evidence:
    """All recipes in the order in which they appear, and notes on the records that were left out."""

    subjects: tuple[Subject, ...]
    notes: tuple[str, ...]

    @property
    def labels(self) -> list[str]:
        """The recipes by label."""
        return [subject.label for subject in self.subjects]

    def condition(self, kind: str, phase: str) -> Condition | None:
        """The (batch size, length) at which most recipes were measured; among equals the longest, then the largest."""
        counts = Counter(
            c for s in self.subjects for c in {condition_of(r) for r in s.of(kind, phase=phase)} if c is not None
        )
        return max(counts, key=lambda c: (counts[c], c[1], c[0])) if counts else None

    def measure(self) -> Measure | None:
        """The task, and its measure, on which most recipes were scored; among equals the one met first."""
        return next(iter(self.measures()), None)

    def measures(self) -> list[Measure]:
        """All of them, those of most recipes first; among equals in the order of the records."""
        counts = Counter(m for s in self.subjects for m in measures(s))
        return [measure for measure, _ in counts.most_common()]

    def reads_texts(self) -> bool:
        """Whether texts longer than trained are to be asked for: not of a task whose rows have lengths of their own."""
        measure = self.measure()
        texts = measure is None or measure.metric == "bits_per_byte"
        return texts or any(by_multiple(r, "bits_per_byte") for s in self.subjects for r in s.of("extrapolation"))

    def reads_longer(self) -> bool:
        """Whether anything longer than trained is to be asked for."""
        return self.reads_texts() or any(subject.of("extrapolation") for subject in self.subjects)

    def baseline(self, measure: Measure | None) -> str | None:
        """The best of the trivial models that the recipes are held against; None where there is none."""
        if measure is None:
            return None
        records = [r for s in self.subjects for r in scored(s, measure)]
        names = dict.fromkeys(n for r in records if isinstance(r.get("baselines"), Mapping) for n in r["baselines"])
        values = {name: over_seeds([number(r, "baselines", name) for r in records]) for name in names}
        return measure.best({name: value for name, value in values.items() if value is not None})

    def groups(self, measure: Measure | None) -> list[str]:
        """The kinds of rows that the task tells apart, in the order of the records."""
        records = [r for s in self.subjects for r in scored(s, measure)]
        return list(dict.fromkeys(str(g) for r in records if isinstance(r.get("groups"), Mapping) for g in r["groups"]))


def gather(records: Iterable[Record]) -> Evidence:
    """Sort records by recipe. What is of an unknown kind or a newer schema is left out and named in a note."""
    kept, notes = sifting.legible(records)
    tried = [r for r in kept if r["kind"] == "sweep"]  # of each learning rate: no recipes of their own
    kept = [r for r in kept if r["kind"] != "sweep"]
    latest = [sifting.named(record) for record in sifting.latest(kept)]
    if len(latest) < len(kept):
        n = len(kept) - len(latest)
        notes.append(
            f"{n} {'records were' if n > 1 else 'record was'} measured again later; the later one counts."
        )
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in latest:
        groups.setdefault((readable(record["recipe"]), str(record.get("recipe_hash") or "")), []).append(record)
    tasks = [list(dict.fromkeys(task_of(r) for r in group if r.get("task") is not None)) for group in groups.values()]
    labels = sifting.labels_of(list(groups), tasks)
    sweeps = [sifting.named(record) for record in sifting.latest(tried)]
    subjects = tuple(
        Subject(label, (*group, *(r for r in sweeps if readable(r["recipe"]) == name and (not on or task_of(r) in on))))
        for label, on, ((name, _), group) in zip(labels, tasks, groups.items(), strict=True)
    )
    return Evidence(subjects, (*notes, *sifting.machine_notes(latest)))


def condition_of(record: Record) -> Condition | None:
    """The (batch size, length) of a record, or None where it has none."""
    batch, length = number(record, "batch_size"), number(record, "length")
    return None if batch is None or length is None else (int(batch), int(length))


def task_of(record: Record) -> str:
    """The task of a quality record, as text."""
    return readable(str(record.get("task") or "unnamed task"))


def measures(subject: Subject) -> list[Measure]:
    """What the recipe was scored by, each once."""
    return list(dict.fromkeys(
        Measure(task_of(r), readable(r["metric"]), bool(r.get("higher_is_better"))) for r in subject.of("quality")
        if isinstance(r.get("metric"), str)
    ))


def scored(subject: Subject, measure: Measure | None) -> list[Record]:
    """Its quality records on a task, one a seed. Where several learning rates were tried, those of the rate that was
    chosen on other rows, ``chosen_lr``: none where nothing says which that is, since a mean over rates is no result."""
    if measure is None:
        return []
    found = [r for r in subject.of("quality", metric=measure.metric) if task_of(r) == measure.task]
    if len({repr(r.get("lr")) for r in found}) < 2:
        return found
    return [r for r in found if r.get("lr") is not None and r.get("lr") == r.get("chosen_lr")]


def failed_trainings(subject: Subject, measure: Measure) -> list[Record]:
    """The trainings that ended without a model to be scored."""
    scored_seeds = {repr(r.get("seed")) for r in scored(subject, measure)}
    return [
        r for r in subject.of("train") if r.get("failed") and r.get("task") in (None, measure.task)
        and repr(r.get("seed")) not in scored_seeds
    ]


def quality_outcome(subject: Subject, measure: Measure | None) -> failures.Answer | None:
    """Why a recipe has no score, in a word; None where no seed failed."""
    if measure is None:
        return None
    records = [*scored(subject, measure), *failed_trainings(subject, measure)]
    said = failures.summary([failures.outcome(r) for r in records])
    return None if said is None else failures.Answer.of(said, records)


def quality(subject: Subject, measure: Measure | None) -> Measured | None:
    """The held-out score; None where a seed failed."""
    if quality_outcome(subject, measure) is not None:
        return None
    found = scored(subject, measure)
    return over_seeds([number(r, "value") for r in found], [pair(r.get("interval")) for r in found])


def in_group(subject: Subject, measure: Measure | None, group: str) -> Measured | None:
    """The held-out score of one kind of rows; None where a seed failed."""
    if quality_outcome(subject, measure) is not None:
        return None
    found = [r for r in scored(subject, measure) if isinstance(r.get("groups"), Mapping)]
    scores = [r["groups"].get(group) for r in found]
    return over_seeds(
        [number(r, "groups", group, "value") for r in found],
        [pair(score.get("interval")) if isinstance(score, Mapping) else None for score in scores],
    )


def baseline(subject: Subject, measure: Measure | None, name: str | None) -> Measured | None:
    """The score of a trivial model on the same held-out data."""
    return None if name is None else over_seeds([number(r, "baselines", name) for r in scored(subject, measure)])


def timed(subject: Subject, phase: str, condition: Condition | None) -> list[Record]:
    """Its speed records at one condition, one a seed."""
    return [r for r in subject.of("speed", phase=phase) if condition is not None and condition_of(r) == condition]


def speed(subject: Subject, phase: str, condition: Condition | None) -> Measured | None:
    """Tokens a second at one condition; None where a seed failed."""
    found = timed(subject, phase, condition)
    if any(failures.outcome(r) for r in found):
        return None
    return over_seeds([number(r, "tokens_per_s") for r in found], [_speed_interval(r) for r in found])


def _speed_interval(record: Record) -> tuple[float, float] | None:
    """The rates at the recorded 20 % and 80 % points of the time; else the spread of the repeats, laid around the rate."""
    tokens, fast, slow = (number(record, name) for name in ("tokens", "p20_s", "p80_s"))
    if tokens is not None and fast and slow:
        return tokens / slow, tokens / fast
    rate, median, spread = (number(record, name) for name in ("tokens_per_s", "median_s", "spread_s"))
    if rate is None or spread is None or not median:
        return None
    half = rate * spread / median / 2
    return max(0.0, rate - half), rate + half


def at_multiple(subject: Subject, multiple: float) -> Measured | None:
    """Bits per byte at ``multiple`` times the trained length."""
    found = subject.of("extrapolation")
    return over_seeds(
        [read(by_multiple(r, "bits_per_byte").get(multiple), r) for r in found],
        [pair(by_multiple(r, "interval").get(multiple)) for r in found],
    )


def change_at_multiple(subject: Subject, multiple: float) -> Measured | None:
    """Bits per byte at ``multiple`` times the trained length less those within it, on the same documents; None where a seed's
    record does not say it, or one seed read too few documents."""
    found = [r for r in subject.of("extrapolation") if by_multiple(r, "bits_per_byte").get(multiple) is not None]
    items = [item if isinstance(item := by_multiple(r, "change").get(multiple), Mapping) else {} for r in found]
    values = [read(item.get("value"), r) for item, r in zip(items, found, strict=True)]
    spreads = [pair(item.get("interval")) for item in items]
    few = len(found) == 1 and (number(found[0], "n_documents") or 0) < FEWEST_DOCUMENTS
    return None if few or None in values or None in spreads else over_seeds(values, spreads)


def by_multiple(record: Record, field: str) -> dict[float, Any]:
    """A field of an extrapolation record that has one item for each of its ``multiples``, as multiple -> item."""
    multiples, items = record.get("multiples"), record.get(field)
    if not isinstance(multiples, Sequence) or isinstance(multiples, str):
        return {}
    wanted = [finite(m) for m in multiples]
    if isinstance(items, Mapping):
        keyed = {str(key).rstrip("x"): item for key, item in items.items()}
        return {m: keyed[f"{m:g}"] for m in wanted if m is not None and f"{m:g}" in keyed}
    if not isinstance(items, Sequence) or isinstance(items, str):
        return {}
    return {m: item for m, item in zip(wanted, items, strict=False) if m is not None}


def trained_lengths(subject: Subject, task: str | None = None) -> list[int]:
    """The lengths (tokens) at which its extrapolation runs on ``task`` were trained (None: on texts), in order."""
    records = subject.of("extrapolation")
    found = [r for r in records if (by_multiple(r, "bits_per_byte") if task is None else task_of(r) == task)]
    return [int(n) for n in (number(r, "trained_length") for r in found) if n]


def trained_length(subject: Subject, task: str | None = None) -> int | None:
    """The last of :func:`trained_lengths`; None where there is none."""
    return next(reversed(trained_lengths(subject, task)), None)


def state_bytes(subject: Subject, length: int, part: str = "used") -> Measured | None:
    """Bytes of state of one sequence after ``length`` tokens."""
    return subject.measured("model", "state_bytes", str(length), part)
