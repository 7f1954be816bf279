"""What the records say, recipe by recipe: which records count, and one number out of several seeds.

A report reads records and nothing else, and never guesses: a field that is missing, null or no number gives None, which
every table and chart shows as "not measured".
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hybridtf.bench.records import KINDS, SCHEMA

Record: TypeAlias = Mapping[str, Any]
Condition: TypeAlias = tuple[int, int]
"""Batch size and length (tokens) at which a speed or a memory was measured."""

# Two-sided 95 % points of Student's t for 1, 2, ... degrees of freedom; the normal's beyond.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL95 = 1.960

# Characters that no XML, and so no SVG, can hold: controls and halves of surrogate pairs.
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

# What tells two measurements of one kind, recipe and seed apart; the later of two that agree in all of this counts.
_CONDITIONS = {
    "quality": ("task", "metric"),
    "speed": ("phase", "batch_size", "length"),
    "kernel": ("op", "kernel", "phase", "batch_size", "length"),
    "memory": ("phase", "batch_size", "length"),
    "extrapolation": ("task", "protocol"),
    "fits": ("phase", "batch_size", "limit_bytes"),
}


@dataclass(frozen=True)
class Measured:
    """A number, its 95 % interval (None where nothing tells it) and from how many seeds it comes."""

    value: float
    low: float | None = None
    high: float | None = None
    n_seeds: int = 1

    @property
    def half(self) -> float | None:
        """Half the width of the interval."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    def overlaps(self, other: Measured) -> bool | None:
        """Whether the two intervals have a point in common; None where one of them is not known."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return None
        return self.low <= other.high and other.low <= self.high


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
    def n_params(self) -> int | None:
        """Parameters, the same in every record of a recipe."""
        counts = [int(n) for n in (number(r, "n_params") for r in self.records) if n is not None]
        return counts[-1] if counts else None

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
        counts = Counter(m for s in self.subjects for m in measures(s))
        return max(counts, key=lambda measure: counts[measure]) if counts else None

    def reads_texts(self) -> bool:
        """Whether texts longer than trained are to be asked for: not of a task whose rows have lengths of their own."""
        measure = self.measure()
        texts = measure is None or measure.metric == "bits_per_byte"
        return texts or any(subject.of("extrapolation") for subject in self.subjects)

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
    kept, notes = _readable(records)
    kept = [r for r in kept if r["kind"] != "sweep"]  # learning rates that were tried are no recipes of their own
    latest = _latest(kept)
    if len(latest) < len(kept):
        n = len(kept) - len(latest)
        notes.append(
            f"{n} {'records were' if n > 1 else 'record was'} measured again later; the later one counts."
        )
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in latest:
        groups.setdefault((readable(record["recipe"]), str(record.get("recipe_hash") or "")), []).append(record)
    subjects = tuple(
        Subject(label, tuple(group)) for label, group in zip(_labels(list(groups)), groups.values(), strict=True)
    )
    return Evidence(subjects, (*notes, *_machine_notes(latest)))


def _labels(groups: list[tuple[str, str]]) -> list[str]:
    """The name alone where it is unique, else with as much of the hash as tells them apart."""
    for shown in (0, 7, 64):
        labels = [
            name if shown == 0 or _times(groups, name) == 1 else f"{name} ({digest[:shown] or 'no hash'})"
            for name, digest in groups
        ]
        if len(set(labels)) == len(labels):
            return labels
    return [f"{name} (recipe {i + 1})" for i, (name, _) in enumerate(groups)]


def _times(groups: list[tuple[str, str]], name: str) -> int:
    return sum(other == name for other, _ in groups)


def readable(text: str) -> str:
    """``text`` with a replacement character for what cannot be shown."""
    return _ILLEGAL.sub("\ufffd", text)


def number(record: Any, *path: str) -> float | None:
    """The finite number at ``path``, or None."""
    for name in path:
        if not isinstance(record, Mapping):
            return None
        record = record.get(name)
    return finite(record)


def finite(value: Any) -> float | None:
    """``value`` as a float where it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def pair(value: Any) -> tuple[float, float] | None:
    """``value`` as (low, high) where it is a list of two finite numbers, else None."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        return None
    low, high = finite(value[0]), finite(value[1])
    return None if low is None or high is None else (low, high)


def condition_of(record: Record) -> Condition | None:
    """The (batch size, length) of a record, or None where it has none."""
    batch, length = number(record, "batch_size"), number(record, "length")
    return None if batch is None or length is None else (int(batch), int(length))


def task_of(record: Record) -> str:
    """The task of a quality record, as text."""
    return readable(str(record.get("task") or "unnamed task"))


def over_seeds(
    values: Sequence[float | None], intervals: Sequence[tuple[float, float] | None] | None = None
) -> Measured | None:
    """One number out of one value a seed; None where there is no value.

    One seed keeps the interval that it was recorded with. Of several: the mean, with Student's 95 % interval over the
    seeds, but never narrower than the seeds' own intervals are on average.
    """
    bounds = intervals if intervals is not None else [None] * len(values)
    found = [(value, bound) for value, bound in zip(values, bounds, strict=True) if value is not None]
    if not found:
        return None
    if len(found) == 1:
        value, bound = found[0]
        return Measured(value, *(bound or (None, None)))
    n = len(found)
    mean = math.fsum(value for value, _ in found) / n
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value, _ in found) / (n - 1))
    half = (_T95[n - 2] if n - 2 < len(_T95) else _NORMAL95) * spread / math.sqrt(n)
    own = [(value - bound[0], bound[1] - value) for value, bound in found if bound is not None]
    below = max([half, math.fsum(b for b, _ in own) / len(own)] if own else [half])
    above = max([half, math.fsum(a for _, a in own) / len(own)] if own else [half])
    return Measured(mean, mean - below, mean + above, n)


def measures(subject: Subject) -> list[Measure]:
    """What the recipe was scored by, each once."""
    return list(dict.fromkeys(
        Measure(task_of(r), readable(r["metric"]), bool(r.get("higher_is_better"))) for r in subject.of("quality")
        if isinstance(r.get("metric"), str)
    ))


def scored(subject: Subject, measure: Measure | None) -> list[Record]:
    """Its quality records on a task."""
    if measure is None:
        return []
    return [r for r in subject.of("quality", metric=measure.metric) if task_of(r) == measure.task]


def quality(subject: Subject, measure: Measure | None) -> Measured | None:
    """The held-out score."""
    found = scored(subject, measure)
    return over_seeds([number(r, "value") for r in found], [pair(r.get("interval")) for r in found])


def in_group(subject: Subject, measure: Measure | None, group: str) -> Measured | None:
    """The held-out score of one kind of rows."""
    found = [r["groups"].get(group) for r in scored(subject, measure) if isinstance(r.get("groups"), Mapping)]
    return over_seeds(
        [number(score, "value") for score in found],
        [pair(score.get("interval")) if isinstance(score, Mapping) else None for score in found],
    )


def baseline(subject: Subject, measure: Measure | None, name: str | None) -> Measured | None:
    """The score of a trivial model on the same held-out data."""
    return None if name is None else over_seeds([number(r, "baselines", name) for r in scored(subject, measure)])


def speed(subject: Subject, phase: str, condition: Condition | None) -> Measured | None:
    """Tokens a second at one condition."""
    found = [r for r in subject.of("speed", phase=phase) if condition is not None and condition_of(r) == condition]
    return over_seeds([number(r, "tokens_per_s") for r in found], [_speed_interval(r) for r in found])


def _speed_interval(record: Record) -> tuple[float, float] | None:
    """The recorded spread of the repeats, laid around the rate."""
    rate, median, spread = (number(record, name) for name in ("tokens_per_s", "median_s", "spread_s"))
    if rate is None or spread is None or not median:
        return None
    half = rate * spread / median / 2
    return max(0.0, rate - half), rate + half


def at_multiple(subject: Subject, multiple: float) -> Measured | None:
    """Bits per byte at ``multiple`` times the trained length."""
    found = subject.of("extrapolation")
    return over_seeds(
        [finite(by_multiple(r, "bits_per_byte").get(multiple)) for r in found],
        [pair(by_multiple(r, "interval").get(multiple)) for r in found],
    )


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


def trained_length(subject: Subject) -> int | None:
    """The length (tokens) at which its extrapolation runs were trained."""
    found = [n for n in (number(r, "trained_length") for r in subject.of("extrapolation")) if n]
    return int(found[-1]) if found else None


def state_bytes(subject: Subject, length: int, part: str = "used") -> Measured | None:
    """Bytes of state of one sequence after ``length`` tokens."""
    return subject.measured("model", "state_bytes", str(length), part)


def _readable(records: Iterable[Record]) -> tuple[list[Record], list[str]]:
    kept: list[Record] = []
    refused: Counter[str] = Counter()
    for record in records:
        reason = _refusal(record)
        if reason is None:
            kept.append(record)
        else:
            refused[reason] += 1
    return kept, [
        f"{n} {'records were' if n > 1 else 'record was'} left out: {reason}." for reason, n in refused.items()
    ]


def _refusal(record: Any) -> str | None:
    """Why a record cannot be shown, or None."""
    if not isinstance(record, Mapping):
        return "no JSON object"
    schema = record.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        return f"schema {schema!r} is no version number"
    if schema > SCHEMA:
        return f"schema {schema} is newer than the {SCHEMA} that this version reads"
    if record.get("kind") not in KINDS:
        return f"unknown kind {record.get('kind')!r}"
    return None if isinstance(record.get("recipe"), str) else "it names no recipe"


def _latest(records: list[Record]) -> list[Record]:
    last: dict[tuple[str, ...], Record] = {}
    for record in records:
        names = ("kind", "recipe", "recipe_hash", "seed", *_CONDITIONS.get(record["kind"], ()))
        key = tuple(repr(record.get(name)) for name in names)
        last[key] = record  # at the place of the first, so that measuring again does not reorder the recipes
    return list(last.values())


def _machine_notes(records: Iterable[Record]) -> list[str]:
    """Speeds of different machines stand in one table: the reader must know."""
    machines = {
        tuple(str(environment.get(name)) for name in ("cpu", "gpu", "threads"))
        for record in records
        if record["kind"] == "speed" and isinstance(environment := record.get("environment"), Mapping)
    }
    return (
        ["Speeds were measured on different machines or thread counts, so they do not compare."]
        if len(machines) > 1
        else []
    )
