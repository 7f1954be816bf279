"""Student's t and the binomial's exact interval, from the incomplete beta function: what few values allow to be said."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

TINY = 1e-300
LEAST_P = 1e-12


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b) of ``a``, ``b`` > 0 and ``x`` in [0, 1], to about 1e-12.

    The continued fraction 26.5.8 of Abramowitz and Stegun (1964), by Lentz's method (1976).
    """
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side alone
        return 1.0 - incomplete_beta(b, a, 1.0 - x)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1) or TINY)
    fraction = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d, c = 1.0 / (1.0 + term * d or TINY), 1.0 + term / c or TINY
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-14:
            break
    return math.exp(front) * fraction / a


def student_p(t: float, degrees: float) -> float:
    """The two-sided p of ``t`` under Student's t with ``degrees`` > 0 degrees of freedom."""
    return incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


def summed_half(p: float, parts: Sequence[tuple[float, float]]) -> float:
    """Half the interval of level 1 - ``p`` of a normal mean whose variance is a sum of estimated ones, ``parts``: (variance,
    degrees of freedom) each. The halves of the parts' own intervals, squared and added (Howe 1974; Zou and Donner 2008): never
    narrower than that of any part alone, so that an estimate of few degrees that is small by chance is not believed."""
    return math.sqrt(math.fsum(student_point(p, degrees) ** 2 * variance for variance, degrees in parts if variance > 0))


def summed_p(value: float, parts: Sequence[tuple[float, float]]) -> float:
    """The p at which the interval of :func:`summed_half` reaches from ``value`` to 0; 1e-12 at least."""
    there = [(variance, degrees) for variance, degrees in parts if variance > 0]
    if value == 0 or not there:
        return float(value == 0)
    low = max(LEAST_P, *(student_p(abs(value) / math.sqrt(variance), degrees) for variance, degrees in there))
    if len(there) == 1 or summed_half(low, there) <= abs(value):
        return low
    return math.exp(_root(lambda p: 1.0 - summed_half(math.exp(p), there) / abs(value), math.log(low), 0.0))


@lru_cache(maxsize=65_536)
def student_point(p: float, degrees: float) -> float:
    """The t > 0 whose two-sided p is ``p``, 0 < p <= 1."""
    high = 1.0
    while student_p(high, degrees) > p:
        high *= 2
    if p == 1:
        return 0.0
    return math.exp(_root(lambda t: math.log(p / max(TINY, student_p(math.exp(t), degrees))), math.log(1e-9), math.log(high)))


def student95(degrees: float) -> float:
    """The two-sided 95 % point of Student's t for ``degrees`` > 0 degrees of freedom."""
    return student_point(0.05, degrees)


def clopper_pearson(k: float, n: float) -> tuple[float, float]:
    """The exact 95 % interval of a share that ``k`` of ``n`` > 0 throws showed (Clopper and Pearson 1934). Both may be
    fractions: the beta distribution that stands for the binomial is defined for those too."""
    low = 0.0 if k <= 0 else _root(lambda x: incomplete_beta(k, n - k + 1, x) - 0.025, 0.0, 1.0)
    high = 1.0 if k >= n else _root(lambda x: incomplete_beta(k + 1, n - k, x) - 0.975, 0.0, 1.0)
    return low, high


def _root(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that rises is 0 between ``low`` (below 0 there, or 0) and ``high``: the Illinois form of false position
    (Dowell and Jarratt 1971), every third step a halving, to 1e-10 of the larger of 1 and the place, or to 1e-13 of 0."""
    below, above, side = rising(low), rising(high), 0
    if below >= 0 or above <= 0:
        return low if below >= 0 else high
    step, middle = 0, low
    while high - low > 1e-10 * max(1.0, abs(low)):
        step += 1
        middle = (low * above - high * below) / (above - below) if step % 3 else (low + high) / 2
        value = rising(middle)
        if abs(value) < 1e-13:
            break
        if value < 0:
            low, below, above, side = middle, value, above / 2 if side < 0 else above, -1
        else:
            high, above, below, side = middle, value, below / 2 if side > 0 else below, 1
    return middle
