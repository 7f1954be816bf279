"""A stretch of ``linear_scan`` as an affine map of the state, so that a sequence can be split over ranks."""

from __future__ import annotations

from typing import TypeAlias

import torch

from hybridtf.core.segments import Segments
from hybridtf.ops.linear_scan.chunked import linear_scan_chunked
from hybridtf.ops.linear_scan.shapes import Number, Parts, check, number, product

Summary: TypeAlias = tuple[Number, Number]
"""(A, S): what a stretch does to the state that enters it, S_out = A S_in + S, both (b ...channels), or pairs."""


def linear_scan_summary(
    u: Number, log_a: Number | None = None, *, a: Number | None = None, segments: Segments | None = None
) -> Summary:
    """What a stretch does to the state it is given: S_out = A S_in + S, in float32 or float64.

    Arguments and errors as of :func:`linear_scan_reference`. A is what the stretch makes of a state of one when nothing is
    written: 0 for rows whose last document is not the incoming one.
    """
    args = check(u, log_a, a, None, segments)
    nothing = number(tuple(torch.zeros_like(x) for x in args.u))
    one = number(tuple(
        torch.full_like(x[:, 0] if x.shape[1] else x.new_zeros(x.shape[0], *x.shape[2:]), 1 - i, dtype=args.dtype)
        for i, x in enumerate(args.u)
    ))
    _, decay = linear_scan_chunked(nothing, log_a, a=a, initial_state=one, segments=segments)
    _, state = linear_scan_chunked(u, log_a, a=a, segments=segments)
    return decay, state


def linear_scan_combine(first: Summary, second: Summary) -> Summary:
    """The map of two stretches in turn, ``first`` then ``second``. Associative."""
    (decay_1, state_1), (decay_2, state_2) = (tuple(map(_parts, pair)) for pair in (first, second))
    state = tuple(x + y for x, y in zip(product(decay_2, state_1), state_2, strict=True))
    return number(product(decay_2, decay_1)), number(state)


def _parts(value: Number) -> Parts:
    return value if isinstance(value, tuple) else (value,)
