"""One token of ``dplr``: the decode step, with no chunk machinery."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import mask_pads


def dplr_step(
    q: Tensor, k: Tensor, v: Tensor, log_w: Tensor, u: Tensor, r: Tensor, state: Tensor, segments: Segments | None
) -> tuple[Tensor, Tensor]:
    """The op for t = 1, arguments checked. The state (b h k p) is as :func:`start_state` gives it: already forgotten where a
    document begins; its dtype is the precision. Returns y (b 1 h p) in v's dtype and the new state."""
    q_t, k_t, v_t, w_t, u_t, r_t = (mask_pads(x, segments)[:, 0].to(state.dtype) for x in (q, k, v, log_w, u, r))
    read = r_t[..., None, :] @ state  # [b, h, 1, p]
    # Both writes in one product: [u k] [read v]^T.
    written = torch.stack([u_t, k_t], -1) @ torch.cat([read, v_t[..., None, :]], -2)
    new = torch.addcmul(written, state, w_t.exp()[..., None])
    y = (q_t[..., None, :] @ new)[..., 0, :]
    return y[:, None].to(v.dtype), new
