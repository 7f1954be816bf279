"""The useful operations of ``selective_scan_chunked``: the plain recurrence and its backward, an exponential as one.

Those that the halving adds are not among them.

Axes: b batch, t time, c channels, n states a channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def forward_flops(x: Sequence[int], dt: Any, B: Any, C: Any, A: Sequence[int], D: Any, *rest: Any, **more: Any) -> int:
    """dt A, exp, decay, write (2), read (2) for each state; dt x for each channel, and D x (2) with D. Shapes as arguments."""
    (b, t, c), n = x, A[1]
    return b * t * c * (7 * n + 1 + (0 if D is None else 2))


def backward_flops(x: Sequence[int], dt: Any, B: Any, C: Any, A: Sequence[int], D: Any, *rest: Any, **more: Any) -> int:
    """States again (5 each); gradients of C, states, B, dt x, A and dt (2 each), of the state before (1), of the decay (1).

    For each channel: dt x and its gradients (4), and with D two products with sums (4).
    """
    (b, t, c), n = x, A[1]
    return b * t * c * (19 * n + 5 + (0 if D is None else 4))
