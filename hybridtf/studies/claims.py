"""What a study claims, and whether its records show it: pure functions of records.

A claim is about one number a seed (an accuracy, a difference, a correlation) and a bound. It is shown where every seed keeps
the bound, not shown where one does not, and not measured where a seed lacks the number: a training that failed is no evidence
for anything. A bound is of the finding, never fitted to what was measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias

from hybridtf.bench.records import Record
from hybridtf.core import ConfigError
from hybridtf.report.evidence import by_multiple, over_seeds

Series: TypeAlias = Mapping[int, float | None]
"""A number by seed; None where a seed lacks it."""
Verdict: TypeAlias = Literal["shown", "not shown", "not measured"]

ACCURACY = "accuracy"
"""What most claims are about."""


@dataclass(frozen=True)
class Claim:
    """One statement. ``interval``: 95 % of the mean over seeds (Student's t; of an accuracy the part from 0 to 1), None for
    fewer than two seeds."""

    statement: str
    expected: str
    by_seed: Series
    mean: float | None
    interval: tuple[float, float] | None
    verdict: Verdict


@dataclass(frozen=True)
class Finding:
    """What a study found: its claims, and ``notes`` about what the records do not have."""

    claims: tuple[Claim, ...]
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def unmeasured(self) -> Finding:
        """The same without verdicts: of a run whose numbers say nothing."""
        return replace(self, claims=tuple(replace(claim, verdict="not measured") for claim in self.claims))


def claim(
    statement: str, values: Series, *, at_least: float | None = None, at_most: float | None = None, what: str = ACCURACY,
    provided: Claim | None = None,
) -> Claim:
    """The claim that ``what`` is at least, at most, or between bounds, in every seed.

    ``provided``: a claim without which this one says nothing (a model that never learnt cannot be seen to fall): where it is
    not shown, this one is not measured. Raises :class:`ConfigError` where no bound is given.
    """
    if at_least is None and at_most is None:
        raise ConfigError(f"the claim {statement!r} has no bound; give at_least or at_most")
    words = [f"at least {at_least:g}"] if at_least is not None else []
    words += [f"at most {at_most:g}"] if at_most is not None else []
    known = [value for value in values.values() if value is not None]
    found = over_seeds(list(values.values()))
    interval = None if found is None or found.low is None or found.high is None else (found.low, found.high)
    if interval is not None and what == ACCURACY:  # few seeds that differ give bounds that no mean of shares can have
        interval = max(interval[0], 0.0), min(interval[1], 1.0)
    verdict: Verdict = "not measured"
    if known and len(known) == len(values) and (provided is None or provided.verdict == "shown"):
        kept = all((at_least is None or v >= at_least) and (at_most is None or v <= at_most) for v in known)
        verdict = "shown" if kept else "not shown"
    return Claim(
        statement, f"{what} {' and '.join(words)}", dict(values), None if found is None else found.value, interval, verdict
    )


class Measures:
    """Numbers of a study's records by recipe and seed; of two records of one thing the later counts."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = list(records)
        self.seeds = sorted({record["seed"] for record in self.records})
        self.recipes = list(dict.fromkeys(record["recipe"] for record in self.records))

    def series(self, kind: str, recipe: str, number: Callable[[Record], Any], **fields: Any) -> Series:
        """``number`` of the recipe's records of ``kind`` that have these fields, by seed."""
        found: dict[int, float | None] = dict.fromkeys(self.seeds)
        for record in self.records:
            same = record["kind"] == kind and record["recipe"] == recipe
            if same and all(record.get(name) == value for name, value in fields.items()):
                value = number(record)
                found[record["seed"]] = None if value is None else float(value)
        return found

    def quality(self, recipe: str, group: str | None = None, *, task: str | None = None) -> Series:
        """The task's measure on all held-out rows, or on those of one group, such as ``"64 tokens"``. ``task``: which, where a
        recipe is trained on several."""
        of = {} if task is None else {"task": task}
        if group is None:
            return self.series("quality", recipe, lambda record: record["value"], **of)
        return self.series("quality", recipe, lambda record: record["groups"].get(group, {}).get("value"), **of)

    def beyond(self, recipe: str, multiple: float, *, field: str = "bits_per_byte") -> Series:
        """Bits a byte between the multiple before and ``multiple`` of the trained length; with ``field = "cumulative"`` from
        the start of the document."""
        return self.series("extrapolation", recipe, lambda record: by_multiple(record, field).get(multiple))

    def groups(self, recipe: str, task: str | None = None) -> list[str]:
        """The groups of rows that the recipe was judged by, in the task's order. ``task``: which, where it is trained on
        several."""
        same = {"kind": "quality", "recipe": recipe} | ({} if task is None else {"task": task})
        found = [record["groups"] for record in self.records if same.items() <= record.items()]
        return list(found[-1]) if found else []

    def state_bytes(self, recipe: str, length: int) -> int | None:
        """Bytes in use of the state of one sequence after ``length`` tokens, one of those that ``model`` records have."""
        for record in reversed(self.records):
            if record["kind"] == "model" and record["recipe"] == recipe and record["state_bytes"] is not None:
                size = record["state_bytes"].get(str(length))
                return None if size is None else int(size["used"])
        return None


def difference(one: Series, other: Series) -> Series:
    """``one - other``, seed by seed."""
    return combine(lambda a, b: a - b, one, other)


def lowest(*series: Series) -> Series:
    """The lowest of several, seed by seed: for a claim about all of them."""
    return combine(min, *series)


def highest(*series: Series) -> Series:
    """The highest of several, seed by seed."""
    return combine(max, *series)


def combine(function: Callable[..., float], *series: Series) -> Series:
    """``function`` of the numbers of each seed; None where one of them lacks it."""
    out: dict[int, float | None] = {}
    for seed in dict.fromkeys(seed for each in series for seed in each):
        values = [each.get(seed) for each in series]
        out[seed] = None if None in values else function(*values)
    return out
