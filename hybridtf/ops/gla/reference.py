"""The meaning of ``gla``: one step a token. Axes: b batch, t time, g groups, h heads, k key width, v value width."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import mask_pads, memory_shape, start_state, state_dtype
from hybridtf.ops.gla.shapes import DecayOf, check


def gla_reference(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, *, bonus: Tensor | None = None, initial_state: Tensor | None = None,
    segments: Segments | None = None, chunk_size: int = 64, decay: DecayOf = "keys",
) -> tuple[Tensor, Tensor]:
    """A linear recurrence with a vector of decays: S_t = Diag(exp(log_a_t)) S_{t-1} + k_t v_t^T.

    ``bonus`` None: read after the write, y_t = S_t^T q_t. ``bonus`` (h k): read before it, the token's own pair weighed by
    the bonus, y_t = (S_{t-1} + Diag(bonus) k_t v_t^T)^T q_t.

    ``q`` (b t h k); ``k`` (b t g k), ``v`` (b t g v), ``h`` a multiple of ``g``: head j reads the state of group
    ``j // (h // g)``. ``log_a``, natural logarithm, at most 0: (b t g k); or (b t g v) with ``decay`` "values", where
    S_t = S_{t-1} Diag(exp(log_a_t)) + k_t v_t^T. ``initial_state`` (b g k v), zeros where None. ``chunk_size`` does not
    change the result and is not used here. Returns ``y`` (b t h v) in v's dtype, zero at pads, and the final state (b g k v)
    of each row's last document in float32, or float64 for float64 inputs. Differentiable in all tensor arguments.

    Raises :class:`ConfigError` where shapes do not fit. Source: Yang et al., "Gated Linear Attention Transformers", 2023;
    Peng et al., "Eagle and Finch", 2024 (the bonus).
    """
    check(
        k, v, log_a, q=q, bonus=bonus, initial_state=initial_state, segments=segments, chunk_size=chunk_size, decay=decay
    )
    dtype = state_dtype(q, k, v, log_a, bonus)
    state = start_state(initial_state, memory_shape(k, v), v, dtype, segments)
    q, k, v_wide, steps = (mask_pads(x, segments).to(dtype) for x in (q, k, v, log_a))
    u = None if bonus is None else bonus.to(dtype)[..., None]
    factors = steps.exp()[..., :, None] if decay == "keys" else steps.exp()[..., None, :]
    real = starts = None
    if segments is not None:
        real, starts = segments.real.unbind(1), segments.starts.unbind(1)
    heads = q.shape[2] // k.shape[2]
    out = []
    for i, (q_t, k_t, v_t, a_t) in enumerate(zip(*(x.unbind(1) for x in (q, k, v_wide, factors)), strict=True)):
        old = state
        if real is not None and starts is not None:
            old = torch.where(starts[i][:, None, None, None], torch.zeros_like(state), state)
        pair = k_t[..., :, None] * v_t[..., None, :]
        new = old * a_t + pair
        state = new if real is None else torch.where(real[i][:, None, None, None], new, state)
        before, pair = (x.repeat_interleave(heads, dim=1) for x in (old, pair))
        seen = state.repeat_interleave(heads, dim=1) if u is None else before + u * pair
        out.append((q_t[..., :, None] * seen).sum(-2))
    y = torch.stack(out, 1) if out else v_wide.new_zeros(*q.shape[:3], v.shape[3])
    return mask_pads(y, segments).to(v.dtype), state
