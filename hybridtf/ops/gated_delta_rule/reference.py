"""The meaning of ``gated_delta_rule``: one step a token. Axes: b batch, t time, n sub-steps, g key heads, h value heads,
k key width, p value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import log_steps, mask_pads, memory_shape, start_state, state_dtype
from hybridtf.ops.gated_delta_rule.shapes import check, sizes_of
from hybridtf.ops.gated_delta_rule.step import delta_token


def gated_delta_rule_reference(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_a: Tensor | None = None, *, initial_state: Tensor | None = None,
    segments: Segments | None = None, chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """A memory that is decayed, then read at the key, then corrected there; read as y_t = S_t^T q_t:

        S' = Diag(exp(log_a_t)) S_{t-1};   S_t = S' + beta_t k_t (v_t - S'^T k_t)^T

    ``q``, ``k`` (b t g k); ``v`` (b t h p); ``beta`` (b t h); ``h`` a multiple of ``g``: head j reads key head
    ``j // (h // g)``. ``log_a``: natural logarithm, at most 0, (b t h) one for a head or (b t h k) one for each key channel;
    None: no decay. With keys of length 1, ``beta`` between 0 and 2 keeps the memory bounded; nothing is normalised here.
    With sub-steps ``k`` is (b t n g k), ``v`` (b t n h p), ``beta`` (b t n h): a token decays before the first of its n
    corrections and is read after the last. ``initial_state`` (b h k p), zeros where None. ``chunk_size`` does not change the
    result and is not used here. Returns ``y`` (b t h p) in v's dtype, zero at pads, and the final state (b h k p) of each
    row's last document in float32, or float64 for float64 inputs. Differentiable in all tensor arguments.

    Raises :class:`ConfigError` where shapes do not fit. Sources: https://arxiv.org/abs/2412.06464 (gated delta rule),
    https://arxiv.org/abs/2510.26692 (a decay for each channel), https://arxiv.org/abs/2502.10297 (sub-steps).
    """
    check(k, v, beta, log_a, q=q, initial_state=initial_state, segments=segments, chunk_size=chunk_size)
    dtype = state_dtype(q, k, v, beta, log_a)
    size = sizes_of(k, v)
    steps = None if log_a is None else log_steps(log_a, segments, dtype)
    state = start_state(initial_state, memory_shape(k, v), v, dtype, segments)
    of_rows = [mask_pads(x, segments).to(dtype).unbind(1) for x in (q, k, v, beta)]
    decays = [None] * size.t if steps is None else steps.unbind(1)
    out = []
    for i, (q_t, k_t, v_t, beta_t, step) in enumerate(zip(*of_rows, decays, strict=True)):
        if segments is not None:
            state = torch.where(segments.starts[:, i, None, None, None], torch.zeros_like(state), state)
        y, new = delta_token(size, q_t, k_t, v_t, beta_t, step, state)
        state = new if segments is None else torch.where(segments.real[:, i, None, None, None], new, state)
        out.append(y)
    y = torch.stack(out, 1) if out else v.new_zeros(size.b, 0, size.h, size.p, dtype=dtype)
    return mask_pads(y, segments).to(v.dtype), state
