"""The meaning of ``linear_scan``: one step a token. Axes: b batch, t time, c channels."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import mask_pads
from hybridtf.ops.linear_scan.shapes import Number, check, factor, number, product, spread, start_parts


def linear_scan_reference(
    u: Number, log_a: Number | None = None, *, a: Number | None = None, initial_state: Number | None = None,
    segments: Segments | None = None,
) -> tuple[Number, Number]:
    """A linear recurrence of every channel by itself: h_t = a_t h_{t-1} + u_t.

    ``u`` (b t ...channels). The factor is given one of two ways: ``log_a``, its natural logarithm, at most 0 (-inf: a = 0);
    or ``a`` itself, in [-1, 1]. Either is (b t ...channels), or (...channels) for a factor that time does not change.
    Complex numbers are (re, im) pairs of tensors, all of ``u``, ``log_a`` or ``a``, ``initial_state`` and the results: the
    pair ``log_a`` is then log |a| and the phase in radians. Magnitudes are not checked: above 1 the states grow.
    ``initial_state`` (b ...channels), zeros where None.

    Returns every state ``h`` (b t ...channels), at a pad the state that passes it, and the final state (b ...channels) of
    each row's last document, both in float32, or in float64 if ``u`` or the factor is. Differentiable in all tensors.

    Raises :class:`ConfigError` where the arguments do not fit.
    """
    args = check(u, log_a, a, initial_state, segments)
    state, dtype = start_parts(args), args.dtype
    writes = [_real_steps(x, segments, dtype) for x in args.u]
    if args.decay[0].ndim == args.u[0].ndim:
        steps = [_real_steps(x, segments, dtype) for x in args.decay]
        factors = [factor(parts, args.log) for parts in zip(*steps, strict=True)]
    else:
        factors = [factor(tuple(x.to(dtype) for x in args.decay), args.log)] * args.u[0].shape[1]
    out: list[tuple[Tensor, ...]] = []
    for i, (u_t, a_t) in enumerate(zip(zip(*writes, strict=True), factors, strict=True)):
        old = state
        if segments is not None:
            old = tuple(x.masked_fill(spread(segments.starts[:, i], x), 0) for x in state)
        new = tuple(x + y for x, y in zip(u_t, product(a_t, old), strict=True))
        if segments is not None:
            real = segments.real[:, i]
            new = tuple(torch.where(spread(real, x), x, y) for x, y in zip(new, state, strict=True))
        state = new
        out.append(state)
    h = tuple(torch.stack(x, 1) for x in zip(*out, strict=True)) if out else tuple(x.to(dtype) for x in args.u)
    return number(h), number(state)


def _real_steps(x: Tensor, segments: Segments | None, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """``x`` (b t ...) token by token, zero at pads."""
    return mask_pads(x, segments).to(dtype).unbind(1)
