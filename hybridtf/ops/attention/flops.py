"""What torch's FLOP counter is told of the blockwise form, since it sees no products inside an operator.

As for torch's own attention kernels, every query counts as if it saw every key. Axes: b batch, t queries, s keys,
h heads, k key dim, v value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def forward_flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: Any, **more: Any) -> int:
    """Of the two products of the forward, two for a multiplication and an addition. Arguments as shapes."""
    b, t, h, width = q
    return 2 * b * h * t * k[1] * (width + v[3])


def backward_flops(
    grad: Sequence[int], out: Sequence[int], lse: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int],
    *rest: Any, **more: Any,
) -> int:
    """Of the five products of the backward: scores again, and the gradients of weights, values, queries and keys."""
    b, t, h, width = q
    return 2 * b * h * t * k[1] * (3 * width + 2 * v[3])
