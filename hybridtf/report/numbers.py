"""How numbers are written: as many digits as the interval bears out, commas between thousands, one unit for a whole column."""

from __future__ import annotations

import math
from collections.abc import Iterable

NOT_MEASURED = "not measured"
"""There is a record, and it does not hold this number. Without a record: ``failures.NOT_RUN``."""

THIN = "\u202f"
"""Narrow no-break space, between a number and its unit."""

TO = "\u2013"
"""En dash, between the ends of an interval."""

_BYTES = (("B", 1.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12))
_COUNTS = (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))


def thousands(value: float, decimals: int = 0) -> str:
    """``12,345.6``."""
    return f"{value:,.{max(decimals, 0)}f}"


def digits(value: float, half: float | None = None, significant: int = 3) -> str:
    """``value`` with the digits that ``half``, half its interval, leaves sure; without one, ``significant`` digits."""
    return at_places(value, places_of(value, half, significant))


def places_of(value: float, half: float | None = None, significant: int = 3) -> int:
    """Decimals to show; negative where even whole numbers are too fine.

    ``half`` is shown to two digits up to 3.5 and to one above, as in the tables of particle physics.
    """
    if half:
        power = math.floor(math.log10(half))
        return min((1 if half / 10.0**power < 3.55 else 0) - power, 4)
    return significant - 1 - math.floor(math.log10(abs(value))) if value else 0


def at_places(value: float, places: int) -> str:
    """``value`` rounded to ``places`` decimals."""
    return thousands(round(value, places), places)


def interval(low: float, high: float, places: int | None = None, between: str = " to ") -> str:
    """``low to high``, with the digits of :func:`digits` where ``places`` are not given."""
    shown = places_of(high, (high - low) / 2) if places is None else places
    return at_places(low, shown) + between + at_places(high, shown)


def byte_unit(values: Iterable[float]) -> tuple[str, float]:
    """The unit (1 kB = 1000 bytes) and its size in which the largest of ``values`` is at least one."""
    return _unit(values, _BYTES)


def count_unit(values: Iterable[float]) -> tuple[str, float]:
    """The same for counts: none, k, M, G, T."""
    return _unit(values, _COUNTS)


def in_bytes(value: float) -> str:
    """``value`` bytes with a unit of its own, three digits."""
    unit, size = byte_unit([value])
    return f"{digits(value / size)}{THIN}{unit}"


def in_counts(value: float) -> str:
    """``value`` with k, M, G or T, three digits."""
    unit, size = count_unit([value])
    return f"{digits(value / size)}{THIN}{unit}".strip()


def _unit(values: Iterable[float], units: tuple[tuple[str, float], ...]) -> tuple[str, float]:
    largest = max((abs(value) for value in values), default=0.0)
    return max((unit for unit in units if unit[1] <= largest), key=lambda unit: unit[1], default=units[0])
