"""One token of ``selective_scan``: the decode step."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import mask_pads


def selective_scan_step(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, state: Tensor, segments: Segments | None
) -> tuple[Tensor, Tensor]:
    """The op for t = 1, arguments checked: x, dt (b 1 c), A (c n), B, C (b 1 g n), D (c) or None, state (b c n).

    The state is as :func:`start_state` gives it: already forgotten where a document begins; its dtype is the precision.

    Returns y (b 1 c) in x's dtype and the new state. Groups are read by broadcasting, never repeated.
    """
    b, c, n = state.shape
    groups = B.shape[2]
    x_t, dt_t, B_t, C_t = (mask_pads(z, segments)[:, 0].to(state.dtype) for z in (x, dt, B, C))
    grouped = (b, groups, c // groups)
    decay = (dt_t[..., None] * A.to(state.dtype)).exp().view(*grouped, n)
    written = (dt_t * x_t).view(*grouped, 1) * B_t[:, :, None]
    new = torch.addcmul(written, decay, state.reshape(*grouped, n))
    y = (new @ C_t[..., None]).view(b, c)
    if D is not None:
        y = torch.addcmul(y, D.to(state.dtype), x_t)
    return y[:, None].to(x.dtype), new.view(b, c, n)
