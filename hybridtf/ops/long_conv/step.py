"""One token of ``long_conv``: a sum over the past, with no transform. Axes: b batch, s past slots, c channels, w taps."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import state_dtype


def long_conv_step(x: Tensor, weight: Tensor, past: Tensor, past_length: Tensor, segments: Segments | None) -> Tensor:
    """The op for t = 1 and a past, arguments checked."""
    dtype = state_dtype(x, weight)
    ago = past_length[:, None] - torch.arange(past.shape[1], device=x.device)  # [b, s]: 1 at the newest
    seen = (ago > 0) & (ago < weight.shape[1])
    if segments is not None:
        seen = seen & ~segments.starts
    taps = weight.to(dtype).T
    tokens = past.masked_fill(~seen[..., None], 0).to(dtype)
    y = (taps[ago.clamp(0, weight.shape[1] - 1)] * tokens).sum(1)
    y = y[:, None] + taps[0] * x.to(dtype)
    return (y if segments is None else y.masked_fill(~segments.real[..., None], 0)).to(x.dtype)
