"""What torch's FLOP counter is told of the two passes of ``ssd_chunked``, since it sees no products inside an operator.

Axes: b batch, t time, g groups, h heads, n keys, p values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def forward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: Any, **more: Any) -> int:
    """Of the matrix products of the forward, two for a multiplication and an addition. Arguments as shapes."""
    return sum(2 * scores + 2 * pairs + 4 * states for scores, pairs, _, states in _chunks(k, v, rest[4]))


def backward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: Any, **more: Any) -> int:
    """The same of the backward, which computes scores and states again."""
    chunks = _chunks(k, v, rest[4])
    return sum(6 * scores + 4 * pairs + 2 * steps + 12 * states for scores, pairs, steps, states in chunks)


def _chunks(k: Sequence[int], v: Sequence[int], chunk_size: int) -> list[tuple[int, int, int, int]]:
    """Multiplications of one product of each kind, in all full chunks and in the rest: queries by keys, weights by
    values, gradients of pairs to steps, and any product with a state."""
    (b, t, g, n), (h, p) = k, v[2:]
    return [
        (many * g * size**2 * n, many * h * size**2 * p, many * h * size**3, many * h * size * n * p)
        for many, size in ((b * (t // chunk_size), chunk_size), (b, t % chunk_size))
    ]
