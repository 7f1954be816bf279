"""The meaning of ``state_space``: one step a token. Axes: b batch, t time, c channels, n states of a channel."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import mask_pads
from hybridtf.ops.state_space.shapes import Number, System, advance, as_given, check, read, start_joined, written


def state_space_reference(
    u: Tensor, *, b: Number, c: Number, log_a: Number | None = None, a: Tensor | None = None,
    initial_state: Number | None = None, segments: Segments | None = None, chunk_size: int = 64,
) -> tuple[Tensor, Number]:
    """A linear system that time does not change, one for each channel: h_t = A h_{t-1} + B u_t, y_t = Re(C h_t).

    ``u`` (b t c); ``b``, ``c`` (c n). A is given one of two ways: diagonal, by ``log_a`` (c n), its natural logarithm, at
    most 0; or dense and real, ``a`` (c n n). Complex numbers are (re, im) pairs of tensors, all of ``b``, ``c``, ``log_a``
    (then log |A| and the phase in radians), ``initial_state`` and the final state. Magnitudes are not checked: above 1 states
    grow.
    ``initial_state`` (b c n), zeros where None. ``chunk_size``, a power of 2, does not change the result.

    Returns y (b t c) in u's dtype, zero at pads, and the final state (b c n) of each row's last document in float32, or
    float64 if a tensor is. Differentiable in all tensors. Raises :class:`ConfigError` where the arguments do not fit.
    """
    system = check(u, b, c, log_a, a, initial_state, segments, chunk_size)
    state = start_joined(u, system, initial_state, segments)
    cast = System(system.form, *(tuple(x.to(state.dtype) for x in part) for part in system[1:]))
    writes, reads = written(cast), read(cast)
    out = []
    for i, u_t in enumerate(mask_pads(u, segments).to(state.dtype).unbind(1)):
        old = state
        if segments is not None:
            old = state.masked_fill(segments.starts[:, i, None, None], 0)
        new = advance(old, cast) + u_t[..., None] * writes
        state = new if segments is None else torch.where(segments.real[:, i, None, None], new, state)
        out.append((state * reads).sum(-1))
    y = torch.stack(out, 1) if out else torch.zeros_like(u)
    return mask_pads(y, segments).to(u.dtype), as_given(state, system)
