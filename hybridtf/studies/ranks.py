"""Spearman's rank correlation, and its interval over the things that were ranked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridtf.bench.bootstrap import Floats

DRAWS = 2000


def spearman(one: Sequence[float | None], other: Sequence[float | None]) -> float:
    """The correlation of ranks, ties having their mean rank; 0 where one side is all the same."""
    a, b = (_ranks(np.array(values, dtype=np.float64)) for values in (one, other))
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / scale if scale else 0.0


def spearman_interval(one: Sequence[float], other: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """The 95 % percentile interval of :func:`spearman` when the n things are drawn again with replacement (Efron 1979)."""
    a, b = np.array(one, dtype=np.float64), np.array(other, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(len(a), size=(DRAWS, len(a)))
    found = [spearman(list(a[i]), list(b[i])) for i in drawn]
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)


def _ranks(values: Floats) -> Floats:
    """(n) ranks from 1, equal values sharing the mean of theirs."""
    less = (values[None] < values[:, None]).sum(1)
    same = (values[None] == values[:, None]).sum(1)
    ranks: Floats = less + (same + 1) / 2
    return ranks
