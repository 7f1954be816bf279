"""One token of ``gla``: the decode step, with no chunk machinery."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import mask_pads
from hybridtf.ops.gla.shapes import DecayOf


def gla_step(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, bonus: Tensor | None, state: Tensor, segments: Segments | None,
    decay: DecayOf,
) -> tuple[Tensor, Tensor]:
    """The op for t = 1, arguments checked. The state (b g k v) is as :func:`start_state` gives it: already forgotten where a
    document begins; its dtype is the precision. Returns y (b 1 h v) in v's dtype and the new state.
    """
    (b, g, n, p), h = state.shape, q.shape[2]
    q_t, k_t, v_t, a_t = (mask_pads(x, segments)[:, 0].to(state.dtype) for x in (q, k, v, log_a))
    factor = a_t.exp()[..., :, None] if decay == "keys" else a_t.exp()[..., None, :]
    pair = k_t[..., :, None] * v_t[..., None, :]
    new = torch.addcmul(pair, state, factor)
    by_group = q_t.reshape(b, g, h // g, n)
    if bonus is None:
        y = by_group @ new
    else:
        own = (by_group * bonus.to(state.dtype).view(g, h // g, n) * k_t[:, :, None]).sum(-1, keepdim=True)
        y = by_group @ state + own * v_t[:, :, None]
    return mask_pads(y.reshape(b, 1, h, p), segments).to(v.dtype), new
