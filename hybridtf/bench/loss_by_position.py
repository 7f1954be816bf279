"""Loss along documents that are all as long: by multiple of the trained length, by position, and what beyond it does.

Numbers are means over documents of nats (n t, float64), of which every document has as many. Bits are bits a UTF-8 byte;
``bytes_per_token`` is exact for bytes, and for other tokenizers one factor for all positions, so that lines compare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtf.bench.bootstrap import Floats, interval

BUCKETS_PER_LENGTH = 8
"""Position buckets within each trained length."""
FIRST_BUCKET = 16
"""Positions of the first power-of-two bucket."""
EARLY, LATE = 50, 500
"""The tokens of the in-context score (Olsson et al., https://arxiv.org/abs/2209.11895)."""
COLLAPSE_MARGIN = 1.0
"""Bits a byte above the loss within the trained length from which on a model is said to have collapsed."""


def by_multiple(
    nats: NDArray[Any], ends: Sequence[int], bytes_per_token: float, trained_length: int
) -> dict[str, list[Any]]:
    """``bits_per_byte`` between each end and the one before it with its ``interval``, its ``change`` {value, interval} from
    that of the end that is the trained length, document by document, and ``cumulative`` from the start; None where not all
    positions before the end were scored."""
    out: dict[str, list[Any]] = {"bits_per_byte": [], "interval": [], "change": [], "cumulative": []}
    starts = dict(zip(ends, [0, *ends], strict=False))
    near = nats[:, starts[trained_length] : trained_length] if trained_length in starts else None
    for end, start in starts.items():
        values: tuple[Any, ...] = (None, None, None, None)
        if scored_to(nats, end):
            part = nats[:, start:end]
            change = None if near is None or end == trained_length else _change(near, part, bytes_per_token)
            values = (*mean_bits(part, bytes_per_token), change, mean_bits(nats[:, :end], bytes_per_token)[0])
        for name, value in zip(out, values, strict=True):
            out[name].append(value)
    return out


def _change(near: NDArray[Any], far: NDArray[Any], bytes_per_token: float) -> dict[str, Any] | None:
    """The mean over documents of what each has more in ``far`` (n t) than in ``near``, bits a byte, with its interval; None
    where not all of ``near`` was scored."""
    if np.isnan(near).any():
        return None
    units = np.stack([(far.mean(1) - near.mean(1)) / math.log(2) / bytes_per_token, np.ones(len(far))], axis=1)
    return {
        "value": float(units[:, 0].mean()), "interval": interval(units, lambda sums: np.asarray(sums[:, 0] / sums[:, 1])),
    }


def scored_to(nats: NDArray[Any], end: int) -> bool:
    """Whether all documents were scored up to ``end``."""
    return nats.shape[1] >= end and not np.isnan(nats[:, :end]).any()


def mean_bits(nats: NDArray[Any], bytes_per_token: float) -> tuple[float, tuple[float, float] | None]:
    """The mean, with its interval over documents."""
    units = np.stack([nats.sum(1), np.full(len(nats), nats.shape[1])], axis=1)

    def statistic(sums: Floats) -> Floats:
        return np.asarray(sums[:, 0] / sums[:, 1] / math.log(2) / bytes_per_token)

    return float(statistic(units.sum(0, keepdims=True))[0]), interval(units, statistic, least=0.0)


def by_position(nats: NDArray[Any], trained_length: int) -> list[list[float]]:
    """``[first position, mean nats a token, scored tokens]`` of buckets an eighth of the trained length wide."""
    width = max(trained_length // BUCKETS_PER_LENGTH, 1)
    return [[start, mean, n] for start, _, mean, n in _means(nats, range(0, nats.shape[1] + width, width))]


def by_bucket(nats: NDArray[Any]) -> list[list[float]]:
    """``[first position, end, mean nats a token, scored tokens]`` of buckets that end at powers of two, from 16 on."""
    return _means(nats, _doublings(nats.shape[1]))


def _doublings(length: int) -> list[int]:
    edges = [0, FIRST_BUCKET]
    while edges[-1] < length:
        edges.append(2 * edges[-1])
    return edges


def _means(nats: NDArray[Any], edges: Sequence[int]) -> list[list[float]]:
    found = []
    for start, stop in pairwise(edges):
        part = nats[:, start:stop]
        scored = part[~np.isnan(part)]
        if len(scored):
            found.append([start, min(stop, nats.shape[1]), float(scored.mean()), len(scored)])
    return found


def beyond(nats: NDArray[Any], trained_length: int, bytes_per_token: float) -> dict[str, Any]:
    """What the loss does beyond the trained length, over the power-of-two buckets that all documents filled.

    ``slope``: bits a byte for each doubling of the position, by least squares over the buckets that begin at the trained
    length or after it (two at least, else null), and its ``interval`` over documents. ``rise``: bits a byte of the worst of
    them above the last bucket within the trained length.
    """
    edges = _doublings(nats.shape[1])
    full = [(a, b) for a, b in pairwise(edges) if scored_to(nats, b)]
    after, before = [e for e in full if e[0] >= trained_length], [e for e in full if e[1] <= trained_length]
    scale = 1 / math.log(2) / bytes_per_token
    means = np.stack([nats[:, a:b].mean(1) for a, b in after], axis=1) * scale if after else np.empty((len(nats), 0))
    slope, spread = None, None
    if len(after) > 1:
        at = np.array([math.log2(math.sqrt(a * b)) for a, b in after])
        weights = (at - at.mean()) / ((at - at.mean()) ** 2).sum()
        units = np.stack([means @ weights, np.ones(len(means))], axis=1)
        slope = float(units[:, 0].mean())
        spread = interval(units, lambda sums: np.asarray(sums[:, 0] / sums[:, 1]))
    level = float(nats[:, slice(*before[-1])].mean()) * scale if before else None
    rise = float(means.mean(0).max()) - level if after and level is not None else None
    return {"slope": slope, "interval": spread, "n_buckets": len(after), "rise": rise}


def in_context_score(nats: NDArray[Any]) -> dict[str, Any] | None:
    """Nats of token 500 less those of token 50, the mean over documents, with its interval; None for shorter ones. Below
    0 where what was read is of use."""
    if not scored_to(nats, LATE):
        return None
    units = np.stack([nats[:, LATE - 1] - nats[:, EARLY - 1], np.ones(len(nats))], axis=1)
    return {
        "value": float(units[:, 0].mean()),
        "interval": interval(units, lambda sums: np.asarray(sums[:, 0] / sums[:, 1])),
    }


def collapse(
    bits: Sequence[float | None], ends: Sequence[int], within: float | None, uniform: float, trained_length: int
) -> dict[str, Any] | None:
    """The first length beyond the trained one at which the loss says nothing of the text any more, and why; None: at none.

    ``bits``: bits a byte up to each of ``ends``; ``within``: within the trained length; ``uniform``: of a model that
    takes every token for as likely.
    """
    for end, value in zip(ends, bits, strict=True):
        if value is None or end <= trained_length:
            continue
        why = None
        if value >= uniform - 1e-6 * uniform:  # scores are float32: those of a uniform model may round below it
            why = f"{value:.3f} bits/byte, no better than the {uniform:.3f} of the uniform model"
        elif within is not None and value > within + COLLAPSE_MARGIN:
            why = f"{value:.3f} bits/byte, more than {COLLAPSE_MARGIN:g} above the {within:.3f} within the trained length"
        if why is not None:
            return {"length": end, "ratio": end / trained_length, "why": why}
    return None
