"""What torch's FLOP counter is told of the two passes of ``ssd_chunked``, since it sees no products inside an operator.

Axes: b batch, t time, l places in a chunk, g groups, h heads, n keys, p values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def forward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: Any, **more: Any) -> int:
    """Of the matrix products of the forward, two for a multiplication and an addition; arguments as shapes."""
    return sum(
        2 * scores + 2 * pairs + 2 * 2 * states for scores, pairs, _, states in _chunks(k, v, rest[4])
    )


def backward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: Any, **more: Any) -> int:
    """The same of the backward, which computes scores and states again."""
    return sum(
        3 * 2 * scores + 2 * 2 * pairs + 2 * steps + 6 * 2 * states
        for scores, pairs, steps, states in _chunks(k, v, rest[4])
    )


def _chunks(k: Sequence[int], v: Sequence[int], size: int) -> list[tuple[int, int, int, int]]:
    """Multiplications of one product of each kind, for full chunks and for the rest: queries by keys, weights by values,
    decays of pairs to steps, and anything with a state."""
    b, t, g, n = k
    h, p = v[2:]
    return [
        (b * g * l * l * n * c, b * h * l * l * p * c, b * h * l**3 * c, b * h * l * n * p * c)
        for c, l in ((t // size, size), (1, t % size))
    ]
