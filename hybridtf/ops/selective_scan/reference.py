"""The meaning of ``selective_scan``: one step a token. Axes: b batch, t time, c channels, g groups, n states a channel."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import mask_pads, start_state, state_dtype
from hybridtf.ops.selective_scan.shapes import by_group, check


def selective_scan_reference(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *,
    initial_state: Tensor | None = None, segments: Segments | None = None, chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """A recurrence for every channel and state: h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t, read as y_t = C_t . h_t + D x_t.

    ``x``, ``dt`` (b t c), the time step dt at least 0; ``A`` (c n), at most 0; ``B``, ``C`` (b t n), or (b t g n) with
    ``c`` a multiple of ``g``: channel j reads group ``j // (c // g)``; ``D`` (c), none where None. ``initial_state``
    (b c n), zeros where None. ``chunk_size`` does not change the result and is not used here. Returns ``y`` (b t c) in
    x's dtype, zero at pads, and the final state (b c n) of each row's last document in float32, or float64 for float64
    inputs. Differentiable in all tensor arguments.

    Raises :class:`ConfigError` where shapes do not fit. Source: Gu and Dao, "Mamba", 2023 (S6).
    """
    check(x, dt, A, B, C=C, D=D, initial_state=initial_state, segments=segments, chunk_size=chunk_size)
    dtype = state_dtype(x, dt, A, B, C)
    state = start_state(initial_state, (x.shape[0], *A.shape), x, dtype, segments)
    wide, dt, B, C = (mask_pads(z, segments).to(dtype) for z in (x, dt, by_group(B), by_group(C)))
    A, width = A.to(dtype), x.shape[2] // B.shape[2]
    B, C = (z.repeat_interleave(width, dim=2) for z in (B, C))  # [b, t, c, n]
    real = starts = None
    if segments is not None:
        real, starts = segments.real.unbind(1), segments.starts.unbind(1)
    out = []
    for i, (x_t, dt_t, B_t, C_t) in enumerate(zip(wide.unbind(1), dt.unbind(1), B.unbind(1), C.unbind(1), strict=True)):
        old = state
        if starts is not None:
            old = torch.where(starts[i][:, None, None], torch.zeros_like(state), state)
        new = (dt_t[..., None] * A).exp() * old + (dt_t * x_t)[..., None] * B_t
        state = new if real is None else torch.where(real[i][:, None, None], new, state)
        out.append((C_t * state).sum(-1))
    y = torch.stack(out, 1) if out else torch.zeros_like(wide)
    if D is not None:
        y = y + D.to(dtype) * wide
    return mask_pads(y, segments).to(x.dtype), state
