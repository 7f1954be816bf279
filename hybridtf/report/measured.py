"""Numbers out of records: one reading, which knows its record, and one number out of the readings of several seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from hybridtf.bench.distributions import student95

Record: TypeAlias = Mapping[str, Any]

REF = "#record"
"""Where a record that was gathered holds its name in the report; no harness writes a field of this name."""


@dataclass(frozen=True)
class Measured:
    """A number, its 95 % interval (None where nothing tells it) and from how many seeds it comes."""

    value: float
    low: float | None = None
    high: float | None = None
    n_seeds: int = 1
    sources: tuple[str, ...] = field(default=(), compare=False)
    """Names of the records that it comes from (see :func:`~hybridtf.report.sifting.named`)."""

    @property
    def half(self) -> float | None:
        """Half the width of the interval."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    def overlaps(self, other: Measured) -> bool | None:
        """Whether the two intervals have a point in common; None where one of them is not known."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return None
        return self.low <= other.high and other.low <= self.high


class Reading(float):
    """A number that knows the record that it stands in; what is computed from it is a plain number again."""

    source: str

    def __new__(cls, value: float, source: str) -> Reading:
        reading = super().__new__(cls, value)
        reading.source = source
        return reading


def number(record: Any, *path: str) -> float | None:
    """The finite number at ``path``, or None; of a record that was gathered, a :class:`Reading`."""
    value = record
    for name in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return read(value, record)


def read(value: Any, record: Any) -> float | None:
    """``value``, found somewhere in ``record``, as :func:`number` gives it."""
    found, source = finite(value), record.get(REF) if isinstance(record, Mapping) else None
    return found if found is None or source is None else Reading(found, source)


def sources(values: Sequence[float | None]) -> tuple[str, ...]:
    """The records of those readings among ``values`` that know theirs, each once."""
    return tuple(dict.fromkeys(value.source for value in values if isinstance(value, Reading)))


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
        low, high = bound or (None, None)
        return Measured(float(value), low, high, sources=sources(values))
    n = len(found)
    mean = math.fsum(value for value, _ in found) / n
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value, _ in found) / (n - 1))
    half = student95(n - 1) * spread / math.sqrt(n)
    own = [(value - bound[0], bound[1] - value) for value, bound in found if bound is not None]
    below = max([half, math.fsum(b for b, _ in own) / len(own)] if own else [half])
    above = max([half, math.fsum(a for _, a in own) / len(own)] if own else [half])
    return Measured(mean, mean - below, mean + above, n, sources(values))
