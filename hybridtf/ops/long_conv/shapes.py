"""What every form of the op checks before it computes, and past inputs as tokens in front of the new ones.

Axes: b batch, t new tokens, s past slots, c channels, w taps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.checks import check_segments


def check(x: Tensor, weight: Tensor, past: Tensor | None, past_length: Tensor | None, segments: Segments | None) -> None:
    """Raises :class:`ConfigError` where the arguments do not fit together."""
    if x.ndim != 3:
        raise ConfigError(f"long_conv: x must be (b t c); got {tuple(x.shape)}")
    if weight.ndim != 2 or weight.shape[0] != x.shape[2] or not weight.shape[1]:
        raise ConfigError(f"long_conv: weight must be (c w) with c = {x.shape[2]} and w > 0; got {tuple(weight.shape)}")
    if (past is None) != (past_length is None):
        raise ConfigError("long_conv: past and past_length are given together")
    if past is not None and past_length is not None:
        if past.ndim != 3 or past.shape[0] != x.shape[0] or past.shape[2] != x.shape[2]:
            wanted = f"({x.shape[0]}, s, {x.shape[2]})"
            raise ConfigError(f"long_conv: past must be (b s c) = {wanted}; got {tuple(past.shape)}")
        if past_length.shape != x.shape[:1]:
            raise ConfigError(f"long_conv: past_length must be (b) = ({x.shape[0]},); got {tuple(past_length.shape)}")
    check_segments("long_conv", segments, *x.shape[:2])


def joined(
    x: Tensor, past: Tensor | None, past_length: Tensor | None, segments: Segments | None
) -> tuple[Tensor, Segments | None]:
    """Past inputs and new ones side by side (b s+t c), zero where there is no token, and whose document each is."""
    if past is None or past_length is None:
        return (x if segments is None else x.masked_fill(~segments.real[..., None], 0)), segments
    held = torch.arange(past.shape[1], device=x.device) < past_length[:, None]
    if segments is None:
        before, ids = held.to(torch.int64), torch.ones(x.shape[:2], dtype=torch.int64, device=x.device)
    else:
        # A row that begins another document has -1 here: it has no past.
        before = torch.where(held, segments.carried[:, None].clamp(min=0), 0)
        ids = segments.ids
    whole = torch.cat([before, ids], 1)
    tokens = torch.cat([past.to(x.dtype), x], 1).masked_fill((whole == 0)[..., None], 0)
    return tokens, Segments(whole, torch.ones_like(past_length, dtype=torch.bool))
