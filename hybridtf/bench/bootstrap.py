"""Confidence intervals by the bootstrap (Efron 1979): documents are drawn again with replacement, since the tokens of
one document are not independent of each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hybridtf.bench.distributions import student95

Floats: TypeAlias = NDArray[np.float64]

DRAWS = 2000

_NORMAL95 = 1.959964


def student_factor(n: int) -> float:
    """What the spread of a bootstrap over ``n`` > 1 values is to be multiplied by, so that its 95 % interval has Student's
    width: a draw of n has (n - 1) / n of the variance, and the percentiles know nothing of degrees of freedom."""
    return math.sqrt(n / (n - 1)) * student95(n - 1) / _NORMAL95


def interval_of_share(right: NDArray[Any], scored: NDArray[Any]) -> tuple[float, float] | None:
    """The 95 % interval of the share of scored tokens that are right, over n rows; ``right`` and ``scored`` (n).

    Drawing rows again cannot show more than one level where all rows are right, or none is: then it is the exact binomial
    interval of as many rows (Clopper and Pearson 1934), so that 16 of 16 reads as 0.79 to 1. None of no row.
    """
    n, total = len(right), float(np.sum(right))
    if n and total in (0.0, float(np.sum(scored))):
        edge = 0.025 ** (1 / n)
        return (edge, 1.0) if total else (0.0, 1 - edge)
    return interval(np.stack([right, scored], axis=1), lambda sums: np.asarray(sums[:, 0] / sums[:, 1]))


def interval(
    units: NDArray[Any], statistic: Callable[[Floats], Floats], *, level: float = 0.95, seed: int = 0,
    draws: int = DRAWS,
) -> tuple[float, float] | None:
    """The percentile interval of ``statistic``, or None where one unit (or none) shows no spread.

    ``units`` (n c): c sums of each of n documents. ``statistic`` takes the sums of a draw, (r c), to (r) values.
    """
    n = len(units)
    if n < 2:
        return None
    counts = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=draws).astype(np.float64)
    values = statistic(counts @ units.astype(np.float64))
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
