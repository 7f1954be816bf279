"""One token of ``log_linear``: the decode step, with no chunk machinery."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import mask_pads
from hybridtf.ops.log_linear.levels import counted_on
from hybridtf.ops.log_linear.shapes import LogLinearState


def log_linear_step(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, level_scales: Tensor, start: LogLinearState, segments: Segments | None
) -> tuple[Tensor, LogLinearState]:
    """The op for t = 1, arguments checked. ``start``: already forgotten where a document begins; its dtype is the precision."""
    S, count = start
    (b, _, g, n), h = k.shape, v.shape[2]
    q_t, k_t, v_t, a_t, scales = (mask_pads(x, segments)[:, 0].to(S.dtype) for x in (q, k, v, log_a, level_scales))
    q_t, k_t = (x[:, :, None].expand(b, g, h // g, n).reshape(b, h, n) for x in (q_t, k_t))
    own = k_t[..., :, None] * v_t[..., None, :]
    levels = torch.cat([own[:, None], S * a_t.exp()[:, None, :, None, None]], 1)
    read = (levels * scales.mT[..., None, None]).sum(1)  # [b, h, n, p]
    y = (q_t[..., None] * read).sum(-2)[:, None].to(v.dtype)
    after, now = counted_on(levels, count + 1), count + 1
    if segments is not None:
        real = segments.real[:, 0]
        after = torch.where(real[:, None, None, None, None], after, S)
        now = torch.where(real, now, count)
    return y, (after, now)
