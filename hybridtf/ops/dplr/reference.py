"""The meaning of ``dplr``: one step a token. Axes: b batch, t time, h heads, k key width, p value width."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import mask_pads, memory_shape, start_state, state_dtype
from hybridtf.ops.dplr.shapes import check


def dplr_reference(
    q: Tensor, k: Tensor, v: Tensor, log_w: Tensor, u: Tensor, r: Tensor, *, initial_state: Tensor | None = None,
    segments: Segments | None = None, chunk_size: int = 32,
) -> tuple[Tensor, Tensor]:
    """A linear recurrence whose transition is diagonal plus low rank, read after the write:

        S_t = (Diag(exp(log_w_t)) + u_t r_t^T) S_{t-1} + k_t v_t^T;   y_t = S_t^T q_t

    ``q``, ``k``, ``u``, ``r`` (b t h k); ``v`` (b t h p); ``log_w`` (b t h k), or (b t h 1) for one decay a head: natural
    logarithm, at most 0. ``initial_state`` (b h k p), zeros where None. ``chunk_size`` does not change the result and is not
    used here. Returns ``y`` (b t h p) in v's dtype, zero at pads, and the final state (b h k p) of each row's last document
    in float32, or float64 for float64 inputs. Differentiable in all tensor arguments.

    The state stays bounded where the transition does not stretch: that is the caller's business (r and u of a delta rule
    with keys of length 1). Raises :class:`ConfigError` where shapes do not fit.
    """
    check(k, v, log_w, u, r, q=q, initial_state=initial_state, segments=segments, chunk_size=chunk_size)
    dtype = state_dtype(q, k, v, log_w, u, r)
    q, k, v_wide, decay, u, r = (mask_pads(x, segments).to(dtype) for x in (q, k, v, log_w, u, r))
    state = start_state(initial_state, memory_shape(k, v), v, dtype, segments)
    real = starts = None
    if segments is not None:
        real, starts = segments.real.unbind(1), segments.starts.unbind(1)
    out = []
    steps = zip(*(x.unbind(1) for x in (q, k, v_wide, decay, u, r)), strict=True)
    for i, (q_t, k_t, v_t, w_t, u_t, r_t) in enumerate(steps):
        old = state
        if real is not None and starts is not None:
            old = torch.where(starts[i][:, None, None, None], torch.zeros_like(state), state)
        read = (r_t[..., :, None] * old).sum(-2)
        new = old * w_t.exp()[..., None] + u_t[..., :, None] * read[..., None, :] + k_t[..., :, None] * v_t[..., None, :]
        state = new if real is None else torch.where(real[i][:, None, None, None], new, state)
        out.append((q_t[..., :, None] * state).sum(-2))
    y = torch.stack(out, 1) if out else torch.zeros_like(v_wide)
    return mask_pads(y, segments).to(v.dtype), state
