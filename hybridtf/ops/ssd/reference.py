"""The meaning of ``ssd``: one step a token. Axes: b batch, t time, g groups, h heads, n key width, p value width."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import mask_pads, memory_shape, start_state, state_dtype
from hybridtf.ops.ssd.shapes import check


def ssd_reference(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, *, initial_state: Tensor | None = None,
    segments: Segments | None = None, chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """A linear recurrence with one decay a head: S_t = exp(log_a_t) S_{t-1} + k_t v_t^T, read as y_t = S_t^T q_t.

    ``q``, ``k`` (b t g n); ``v`` (b t h p); ``log_a`` (b t h), natural logarithm, at most 0; ``h`` a multiple of ``g``:
    head j reads group ``j // (h // g)``. ``initial_state`` (b h n p), zeros where None. ``chunk_size`` does not change
    the result and is not used here. Returns ``y`` (b t h p) in v's dtype, zero at pads, and the final state (b h n p)
    of each row's last document in float32, or float64 for float64 inputs. Differentiable in all tensor arguments.

    Raises :class:`ConfigError` where shapes do not fit. Source: Dao and Gu, "Transformers are SSMs", 2024 (Mamba-2).
    """
    check(k, v, log_a, q=q, initial_state=initial_state, segments=segments, chunk_size=chunk_size)
    dtype = state_dtype(q, k, v, log_a)
    heads = v.shape[2] // k.shape[2]
    q, k, v_wide, decay = (mask_pads(x, segments).to(dtype) for x in (q, k, v, log_a))
    q, k = (x.repeat_interleave(heads, dim=2) for x in (q, k))
    state = start_state(initial_state, memory_shape(k, v), v, dtype, segments)
    real = starts = None
    if segments is not None:
        real, starts = segments.real.unbind(1), segments.starts.unbind(1)
    out = []
    for i, (q_t, k_t, v_t, a_t) in enumerate(
        zip(q.unbind(1), k.unbind(1), v_wide.unbind(1), decay.unbind(1), strict=True)
    ):
        old = state
        if real is not None and starts is not None:
            old = torch.where(starts[i][:, None, None, None], torch.zeros_like(state), state)
        new = old * a_t.exp()[:, :, None, None] + k_t[..., :, None] * v_t[..., None, :]
        state = new if real is None else torch.where(real[i][:, None, None, None], new, state)
        out.append((q_t[..., :, None] * state).sum(-2))
    y = torch.stack(out, 1) if out else torch.zeros_like(v_wide)
    return mask_pads(y, segments).to(v.dtype), state
