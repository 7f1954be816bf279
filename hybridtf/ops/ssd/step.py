"""One token of ``ssd``: the decode step, with no chunk machinery."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import mask_pads


def ssd_step(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, state: Tensor, segments: Segments | None
) -> tuple[Tensor, Tensor]:
    """The op for t = 1, arguments checked: q, k (b 1 g n), v (b 1 h p), log_a (b 1 h), and the state (b h n p).

    The state is as :func:`start_state` gives it: already forgotten where a document begins; its dtype is the precision.

    Returns y (b 1 h p) in v's dtype and the new state. Groups are read by broadcasting, never repeated.
    """
    b, _, g, n = k.shape
    h, p = v.shape[2:]
    q_t, k_t, v_t, a_t = (mask_pads(x, segments)[:, 0].to(state.dtype) for x in (q, k, v, log_a))
    decay = a_t.exp()
    grouped = state.reshape(b, g, h // g, n, p)
    written = k_t.reshape(b, g, 1, n, 1) * v_t.reshape(b, g, h // g, 1, p)
    new = torch.addcmul(written, grouped, decay.reshape(b, g, h // g, 1, 1))
    y = (q_t.reshape(b, g, 1, n, 1) * new).sum(-2)
    return y.reshape(b, 1, h, p).to(v.dtype), new.reshape(b, h, n, p)
