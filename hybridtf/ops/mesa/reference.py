"""The meaning of ``mesa``: one step a token. Axes: b batch, t time, h heads, k key width, v value width."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import mask_pads, start_state, state_dtype
from hybridtf.ops.mesa.shapes import check, state_shape


def mesa_reference(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_a: Tensor, *, ridge: Tensor, initial_state: Tensor | None = None,
    segments: Segments | None = None, chunk_size: int = 64, n_steps: int = 30,
) -> tuple[Tensor, Tensor]:
    """The value at q of the linear map that fits all values so far best, older ones counting less:

        S_t = exp(log_a_t) S_{t-1} + beta_t k_t [k_t, v_t]^T = [K_t, V_t];   y_t = V_t^T (K_t + Diag(ridge))^-1 q_t

    V_t^T (K_t + Diag(ridge))^-1 is the matrix M of the least sum of a weight times |M k_s - v_s|^2, and of ridge M^2.

    ``q``, ``k`` (b t h k); ``v`` (b t h v); ``beta`` (b t h), not negative; ``log_a`` (b t h), at most 0; ``ridge`` (h k),
    positive. ``initial_state`` (b h k k+v), of which the first k columns are symmetric and positive; zeros where None.
    ``chunk_size`` and ``n_steps``, the most steps that another form may take to solve, are not used here: the system is solved
    by elimination. Returns ``y`` (b t h v) in v's dtype, zero at pads, and the state of each row's last document in float32,
    or float64 for float64 inputs. Differentiable in all tensor arguments.

    Raises :class:`ConfigError` where shapes do not fit. Source: https://arxiv.org/abs/2506.05233.
    """
    check(q, k, v, beta, log_a, ridge, initial_state, segments, chunk_size, n_steps)
    dtype = state_dtype(q, k, v, beta, log_a, ridge)
    state, n = start_state(initial_state, state_shape(k, v), v, dtype, segments), k.shape[3]
    added = torch.diag_embed(ridge.to(dtype))
    out = []
    tokens = zip(*(mask_pads(x, segments).to(dtype).unbind(1) for x in (q, k, v, beta, log_a)), strict=True)
    for i, (q_t, k_t, v_t, beta_t, a_t) in enumerate(tokens):
        old = state
        if segments is not None:
            old = state.masked_fill(segments.starts[:, i, None, None, None], 0)
        pair = (beta_t[..., None] * k_t)[..., :, None] * torch.cat([k_t, v_t], -1)[..., None, :]
        new = a_t.exp()[..., None, None] * old + pair
        state = new if segments is None else torch.where(segments.real[:, i, None, None, None], new, state)
        best = torch.linalg.solve(state[..., :n] + added, q_t)
        out.append((best[..., None, :] @ state[..., n:])[..., 0, :])
    y = torch.stack(out, 1) if out else torch.zeros_like(v)
    return mask_pads(y, segments).to(v.dtype), state
