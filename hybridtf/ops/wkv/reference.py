"""The meaning of ``wkv``: one step a token. Axes: b batch, t time, c channels."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import mask_pads, state_dtype
from hybridtf.ops.wkv.sums import LOW, Sums, check, closed, merged, opened, shifted


def wkv_reference(
    k: Tensor, v: Tensor, log_w: Tensor, u: Tensor, *, initial_state: tuple[Tensor, Tensor, Tensor] | None = None,
    segments: Segments | None = None, chunk_size: int = 32,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """A mean of the values so far, channel by channel:

        y_t = (sum_{s<t} e^((t-1-s) log_w + k_s) v_s + e^(u + k_t) v_t) / (the same sum with 1 for v)

    ``k``, ``v`` (b t c); ``log_w`` (c), at most 0, the decay of the weights a token; ``u`` (c), the bonus of the present token.
    ``initial_state``: num, den, max, each (b c): the sums are exp(max) num and exp(max) den, and den = 0 is a state that has
    seen nothing. ``chunk_size`` does not change the result and is not used here. Returns ``y`` (b t c) in v's dtype, zero at
    pads, and the state of each row's last document in float32, or float64 for float64 inputs: its ``max`` is the largest
    exponent so far. Differentiable in all tensor arguments.

    Raises :class:`ConfigError` where shapes do not fit. Source: Peng et al., "RWKV", 2023.
    """
    check(k, v, log_w, u, initial_state, segments, chunk_size)
    dtype = state_dtype(k, v, log_w, u)
    state = opened(initial_state, k, dtype, segments)
    keys, values = (mask_pads(x, segments).to(dtype) for x in (k, v))
    log_w, u = log_w.to(dtype), u.to(dtype)
    real = starts = None
    if segments is not None:
        real, starts = segments.real.unbind(1), segments.starts.unbind(1)
    empty = Sums(torch.zeros_like(state.num), torch.zeros_like(state.den), torch.full_like(state.max, LOW))
    out = []
    for i, (k_t, v_t) in enumerate(zip(keys.unbind(1), values.unbind(1), strict=True)):
        if starts is not None:
            state = _where(starts[i], empty, state)
        one = torch.ones_like(k_t)
        seen = merged(state, Sums(v_t, one, u + k_t))
        out.append(seen.num / seen.den)
        new = merged(shifted(state, log_w, None), Sums(v_t, one, k_t))
        state = new if real is None else _where(real[i], new, state)
    y = torch.stack(out, 1) if out else torch.zeros_like(values)
    return mask_pads(y, segments).to(v.dtype), closed(state)


def _where(rows: Tensor, yes: Sums, no: Sums) -> Sums:
    return Sums(*(torch.where(rows[:, None], a, b) for a, b in zip(yes, no, strict=True)))
