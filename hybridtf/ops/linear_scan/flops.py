"""The useful operations of ``linear_scan_chunked``: the recurrence itself, without the second sweep that makes it parallel.

A multiplication and an addition for each element, real or complex; in the backward those of the reverse recurrence and the
product with the states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def forward_flops(u: Sequence[int], u_im: Sequence[int] | None, *rest: Any, **more: Any) -> int:
    """Arguments as shapes."""
    return math.prod(u) * (2 if u_im is None else 8)


def backward_flops(u: Sequence[int], u_im: Sequence[int] | None, *rest: Any, **more: Any) -> int:
    """The same of the backward; with a logarithm one product more for each element."""
    log = rest[5]
    products = 2 if log else 1
    return math.prod(u) * (2 + products if u_im is None else 8 + 6 * products)
