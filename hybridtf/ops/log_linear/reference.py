"""The meaning of ``log_linear``: one step a token.

Axes: b batch, t time, g groups, h heads, l levels, m levels but the first, n key width, p value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import mask_pads, state_dtype
from hybridtf.ops.log_linear.levels import counted_on
from hybridtf.ops.log_linear.shapes import LogLinearState, check, counts, start_levels


def log_linear_reference(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, level_scales: Tensor, *, initial_state: LogLinearState | None = None,
    segments: Segments | None = None, chunk_size: int = 64,
) -> tuple[Tensor, LogLinearState]:
    """Linear attention with one decay a head, whose past is split into blocks that are weighed apart (log-linear attention).

    With t counted from the document's start, B_0 = {t} and B_l the block of 2^(l-1) tokens for bit l - 1 of t, where set:

        y_t = sum_l level_scales_t[l] sum_{j in B_l} exp(log_a_{j+1} + ... + log_a_t) (q_t.k_j) v_j

    ``q``, ``k`` (b t g n); ``v`` (b t h p); ``log_a`` (b t h), natural logarithm, at most 0; ``level_scales`` (b t h l); ``h``
    a multiple of ``g``: head j reads group ``j // (h // g)``. Beyond 2^(l-1) tokens the last level holds all that is older.
    ``initial_state``: S (b l-1 h n p) of the levels 1 to l - 1, and the count (b) of tokens so far; None: none.
    ``chunk_size`` does not change the result and is not used here. Returns ``y`` (b t h p) in v's dtype, zero at pads, and the
    final state of each row's last document, S in float32, or float64 for float64 inputs.

    Raises :class:`ConfigError` where shapes do not fit. Source: https://arxiv.org/abs/2506.04761.
    """
    check(q, k, v, log_a, level_scales, initial_state, segments, chunk_size)
    dtype, heads = state_dtype(q, k, v, log_a, level_scales), v.shape[2] // k.shape[2]
    q, k, wide, log_a, scales = (mask_pads(x, segments).to(dtype) for x in (q, k, v, log_a, level_scales))
    q, k = (x.repeat_interleave(heads, dim=2) for x in (q, k))
    S, count = start_levels(initial_state, k, v, level_scales, dtype, segments)
    after = counts(count, v.shape[1], segments)
    real = torch.ones_like(after, dtype=torch.bool) if segments is None else segments.real
    out = []
    for i in range(v.shape[1]):
        # A document's first token finds nothing.
        old = torch.where((after[:, i] == 1)[:, None, None, None, None], 0, S) * log_a[:, i].exp()[:, None, :, None, None]
        own = k[:, i, :, :, None] * wide[:, i, :, None, :]
        levels = torch.cat([own[:, None], old], 1)  # [b, l, h, n, p]
        out.append(torch.einsum("bhl,blhnp,bhn->bhp", scales[:, i], levels, q[:, i]))
        S = torch.where(real[:, i][:, None, None, None, None], counted_on(levels, after[:, i]), S)
        count = torch.where(real[:, i], after[:, i], count)
    y = torch.stack(out, 1) if out else torch.zeros_like(wide)
    return mask_pads(y, segments).to(v.dtype), (S, count)
