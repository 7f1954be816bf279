"""What torch's FLOP counter is told of the two passes of ``linear_scan_chunked``, which have no matrix products.

Counted is the recurrence itself, not the second sweep that makes it parallel: a multiplication and an addition for each
element, real or complex; in the backward those of the reverse recurrence and the product with the states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def forward_flops(u: Sequence[Sequence[int]], *rest: Any, **more: Any) -> int:
    """Arguments as shapes, a list of them for real and imaginary parts."""
    return _elements(u[0]) * (2 if len(u) == 1 else 8)


def backward_flops(u: Sequence[Any], decay: Sequence[Any], log: bool, *rest: Any, **more: Any) -> int:
    """The same of the backward; with a logarithm one product more for each element."""
    products = 2 if log else 1
    size = _elements(rest[3][1:])
    return size * (2 + products if len(u) == 1 else 8 + 6 * products)


def _elements(shape: Sequence[int]) -> int:
    return int(math.prod(shape))
