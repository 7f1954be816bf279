"""Confidence intervals over documents and rows, since the tokens of one are not independent of each other: means by the
bootstrap (Efron 1979), shares by the binomial of as many throws as the rows are worth."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hybridtf.bench.distributions import clopper_pearson, student95

Floats: TypeAlias = NDArray[np.float64]

DRAWS = 2000

_NORMAL95 = 1.959964


def student_factor(n: int) -> float:
    """What the spread of a bootstrap over ``n`` > 1 values is to be multiplied by, so that its 95 % interval has Student's
    width: a draw of n has (n - 1) / n of the variance, and the percentiles know nothing of degrees of freedom."""
    return math.sqrt(n / (n - 1)) * student95(n - 1) / _NORMAL95


def interval_of_share(right: NDArray[Any], scored: NDArray[Any]) -> tuple[float, float] | None:
    """The 95 % interval of the share of scored tokens that are right, over n rows; ``right`` and ``scored`` (n). None: no row.

    The exact binomial interval (Clopper and Pearson 1934) of as many throws as would vary as much as the rows do, fewer by
    Student's t where rows are few (Korn and Graubard 1998): rows that are right or wrong as wholes are one throw each. It is
    never surer of a high share than n rows that are all right, nor of a low one than n rows that are all wrong.
    """
    right, scored = right[scored > 0].astype(np.float64), scored[scored > 0].astype(np.float64)
    n, total = len(right), float(scored.sum())
    if not n:
        return None
    share, edge = float(right.sum()) / total, 0.025 ** (1 / n)
    throws = float(n)
    variance = float((((right - share * scored) / total) ** 2).sum())
    if n > 1 and 0 < share < 1:
        throws = min(share * (1 - share) / variance, total) if variance > 0 else total
        if throws > n + 1e-9:
            throws = max(throws * (student95(throws - 1) / student95(n - 1)) ** 2, 1.0)
    low, high = clopper_pearson(share * throws, throws)
    return min(low, edge), max(high, 1 - edge)


def interval(
    units: NDArray[Any], statistic: Callable[[Floats], Floats], *, least: float = -math.inf, seed: int = 0, draws: int = DRAWS,
) -> tuple[float, float] | None:
    """The 95 % percentile interval of ``statistic``, widened around its value to Student's width (:func:`student_factor`), or
    None where one unit (or none) shows no spread.

    ``units`` (n c): c sums of each of n documents. ``statistic`` takes the sums of a draw, (r c), to (r) values; ``least`` is
    what it cannot be below.
    """
    n = len(units)
    if n < 2:
        return None
    sums = units.astype(np.float64)
    counts = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=draws).astype(np.float64)
    value = float(statistic(sums.sum(0, keepdims=True))[0])
    low, high = np.quantile(statistic(counts @ sums), [0.025, 0.975])
    factor = student_factor(n)
    return max(least, value + factor * (float(low) - value)), value + factor * (float(high) - value)
