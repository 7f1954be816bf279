"""One token of ``wkv``: the decode step, with no chunk machinery."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import mask_pads
from hybridtf.ops.wkv.sums import Sums, merged, shifted


def wkv_step(
    k: Tensor, v: Tensor, log_w: Tensor, u: Tensor, state: Sums, segments: Segments | None
) -> tuple[Tensor, Sums]:
    """The op for t = 1, arguments checked. The state (b c) is as :func:`opened` gives it: already empty where a document
    begins; its dtype is the precision. Returns y (b 1 c) in v's dtype and the new state."""
    dtype = state.num.dtype
    k_t, v_t = (mask_pads(x, segments)[:, 0].to(dtype) for x in (k, v))
    one = torch.ones_like(k_t)
    seen = merged(state, Sums(v_t, one, u.to(dtype) + k_t))
    y = (seen.num / seen.den)[:, None]
    new = merged(shifted(state, log_w.to(dtype), None), Sums(v_t, one, k_t))
    if segments is not None:
        new = Sums(*(torch.where(segments.real, a, b) for a, b in zip(new, state, strict=True)))
    return mask_pads(y, segments).to(v.dtype), new
