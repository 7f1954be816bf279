"""What a machine's noise lets a measurement say: paired rounds, an A/A control, and verdicts that it bears out.

In a round every subject is timed once, in an order drawn anew for each round. Were two subjects the same code, their times
within a round could be exchanged, so that the sign of the round's log ratio would be a fair coin however the noise is
distributed and however it drifts from round to round. The signed-rank test (Wilcoxon 1945) rests on that alone; its interval
(Hodges & Lehmann 1963) bounds the ratio. The control is the first subject timed twice in every round: how far the same code
seems to differ from itself is the noise floor, and no difference below it is a verdict.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hybridtf.core import ConfigError

Verdict: TypeAlias = Literal["faster", "slower", "~"]

LEVEL = 0.99
"""Of the interval that must leave out 1 for a verdict."""

FLOOR_LEVEL = 0.95
"""Of the control's interval whose farther end is the noise floor."""

MIN_ROUNDS = 10
"""Fewer bear no verdict: even if all of 7 rounds agree, the interval at :data:`LEVEL` has no ends."""

MAX_SPREAD = 0.05
"""Distance of the quartiles, relative to the median, above which a time is no claim, nor is a ratio that is not beyond it."""

POWER = 0.95
"""How often the detectable effect would be found."""

_EXACT_UP_TO = 128
_NORMAL = statistics.NormalDist()


@dataclass(frozen=True)
class Ratio:
    """How many times as long one takes as the other: the Hodges-Lehmann estimate and its interval, None of too few rounds."""

    time: float
    low: float | None
    high: float | None
    spread: float
    """Distance of the quartiles of the rounds' ratios, relative to their median."""
    rounds: int

    @property
    def half(self) -> float | None:
        """Half the interval, of the logarithm."""
        return None if self.low is None or self.high is None else math.log(self.high / self.low) / 2


@dataclass(frozen=True)
class Control:
    """What the first subject against itself shows."""

    ratio: Ratio
    floor: float | None
    """The largest difference (0.02: 2 %) that the same code twice agrees with; None of too few rounds."""
    reasons: tuple[str, ...]
    """Why no subject of the run gets a verdict."""

    @property
    def detectable(self) -> float | None:
        """The difference (0.03: 3 %) that so many rounds of this noise would show in :data:`POWER` of all runs."""
        half = self.ratio.half
        if half is None or self.floor is None:
            return None
        beyond = _NORMAL.inv_cdf(POWER) * half / _NORMAL.inv_cdf(0.5 + LEVEL / 2)
        return math.expm1(max(half, math.log1p(self.floor)) + beyond)

    def rounds_for(self, effect: float) -> int | None:
        """Rounds that would show ``effect`` (0.03: 3 %) in this noise: they grow with the square of noise over effect."""
        if self.detectable is None:
            return None
        return math.ceil(self.ratio.rounds * (math.log1p(self.detectable) / math.log1p(effect)) ** 2)

    def to_dict(self) -> dict[str, Any]:
        """The record's field ``noise``."""
        return {
            "ratio": self.ratio.time, "interval": ends(self.ratio), "spread": self.ratio.spread, "floor": self.floor,
            "rounds": self.ratio.rounds, "detectable": self.detectable, "rounds_for_3_percent": self.rounds_for(0.03),
            "refused": list(self.reasons),
        }


def ratio_of(times: Sequence[float], others: Sequence[float], level: float = LEVEL) -> Ratio:
    """The ratio of times that were taken in the same rounds. Raises :class:`ConfigError` unless there are as many of each."""
    if len(times) != len(others) or not len(times):
        raise ConfigError(f"a ratio needs rounds that timed both, got {len(times)} times and {len(others)}")
    if min(*times, *others) <= 0:
        raise ConfigError("the clock did not move during a run: measure more work, or with a finer clock")
    logs = np.log(np.asarray(times, float)) - np.log(np.asarray(others, float))
    i, j = np.triu_indices(len(logs))
    walsh = np.sort((logs[i] + logs[j]) / 2)
    out = _left_out(len(logs), level)
    low, high = (None, None) if out is None else (math.exp(walsh[out]), math.exp(walsh[-1 - out]))
    return Ratio(math.exp(float(np.median(walsh))), low, high, relative_spread(np.exp(logs)), len(logs))


def control_of(times: Sequence[float], again: Sequence[float]) -> Control:
    """What a control says that was timed as ``again`` beside ``times``."""
    ratio, loose = ratio_of(again, times), ratio_of(again, times, FLOOR_LEVEL)
    floor = None if loose.low is None or loose.high is None else math.exp(max(-math.log(loose.low), math.log(loose.high))) - 1
    reasons = []
    if ratio.rounds < MIN_ROUNDS:
        reasons.append(f"{ratio.rounds} rounds are too few: at least {MIN_ROUNDS} are needed")
    if ratio.low is not None and ratio.high is not None and not ratio.low <= 1 <= ratio.high:
        reasons.append(f"the same code twice seems to take {ratio.time:.3f} times as long as itself")
    return Control(ratio, floor, tuple(reasons))


def verdict_of(ratio: Ratio, control: Control, more: Sequence[str] = ()) -> tuple[Verdict, tuple[str, ...]]:
    """Whether a subject is faster or slower than the first, and why nothing can be said where that is refused.

    "~" without a reason: the interval holds 1, or the difference is below the noise floor. ``more``: further reasons.
    """
    reasons = [*more, *control.reasons]
    spread = max(ratio.spread, control.ratio.spread)
    if spread > MAX_SPREAD and _nearest(ratio) <= math.log1p(spread):
        reasons.append(
            f"rounds differ by {100 * spread:.1f} % between the quartiles: above {100 * MAX_SPREAD:g} % they bear only a ratio "
            f"whose interval is farther from 1 than that"
        )
    if reasons or ratio.low is None or ratio.high is None or control.floor is None:
        return "~", tuple(reasons)
    if not _nearest(ratio) or abs(math.log(ratio.time)) <= math.log1p(control.floor):
        return "~", ()
    return ("slower" if ratio.time > 1 else "faster"), ()


def _nearest(ratio: Ratio) -> float:
    """The logarithm of the interval's end that is nearer to 1; 0 where it holds 1."""
    if ratio.low is None or ratio.high is None or ratio.low <= 1 <= ratio.high:
        return 0.0
    return min(abs(math.log(ratio.low)), abs(math.log(ratio.high)))


def relative_spread(values: Sequence[float] | NDArray[np.float64]) -> float:
    """The distance of the quartiles, relative to the median."""
    low, middle, high = np.quantile(np.asarray(values, float), [0.25, 0.5, 0.75])
    return float((high - low) / middle)


def drift_of(times: Sequence[float]) -> float | None:
    """How much longer the second half of the runs took than the first (0.1: 10 %), by the medians; None of one run."""
    half = len(times) // 2
    return statistics.median(times[-half:]) / statistics.median(times[:half]) - 1 if half else None


def ends(ratio: Ratio) -> list[float] | None:
    """The interval as a record has it."""
    return None if ratio.low is None or ratio.high is None else [ratio.low, ratio.high]


@functools.cache
def _left_out(n: int, level: float) -> int | None:
    """How many of the n (n + 1) / 2 averages lie outside the interval on each side; None: even the widest is too narrow."""
    tail = (1 - level) / 2
    pairs = n * (n + 1) // 2
    if n > _EXACT_UP_TO:
        sd = math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
        return max(math.floor(pairs / 2 + _NORMAL.inv_cdf(tail) * sd), 0)
    chances = np.zeros(pairs + 1)  # of every sum of the ranks 1..n, each taken by a fair coin
    chances[0] = 1.0
    for rank in range(1, n + 1):
        moved = np.zeros_like(chances)
        moved[rank:] = chances[:-rank]
        chances = (chances + moved) / 2
    within = np.nonzero(np.cumsum(chances) <= tail)[0]
    return int(within[-1]) if len(within) else None
