"""A stretch of ``ssd`` as an affine map of the state, so that a sequence can be split over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import log_steps, mask_pads, state_dtype
from hybridtf.ops.ssd.shapes import check


def ssd_summary(k: Tensor, v: Tensor, log_a: Tensor, *, segments: Segments | None = None) -> tuple[Tensor, Tensor]:
    """What a stretch does to the state it is given: S_out = A S_in + S.

    ``k`` (b t g n), ``v`` (b t h p), ``log_a`` (b t h), at most 0. Returns ``A`` (b h), zero for rows whose last
    document is not the incoming one, and ``S`` (b h n p), both float32 or float64. ``log_a`` is summed in float64.
    Raises :class:`ConfigError` where shapes do not fit.
    """
    check(k, v, log_a, segments=segments)
    dtype = state_dtype(k, v, log_a)
    (b, t, g, n), (h, p) = k.shape, v.shape[2:]
    with no_autocast(v.device):
        steps = log_steps(log_a, segments, torch.float64)
        total = steps.sum(1)
        # What still follows each token, itself excluded: the sum of later steps, so that every exponent is at most 0.
        after = total[:, None] - steps.cumsum(1)
        decay, weight = total.exp().to(dtype), after.clamp(max=0).exp().to(dtype)
        if segments is not None:
            decay = decay.masked_fill(~segments.keeps_state[:, None], 0)
            weight = weight.masked_fill(~segments.in_last[:, :, None], 0)
        keys = mask_pads(k, segments).to(dtype).permute(0, 2, 3, 1)
        values = (mask_pads(v, segments).to(dtype) * weight[..., None]).reshape(b, t, g, h // g * p).transpose(1, 2)
        state = (keys @ values).reshape(b, g, n, h // g, p).transpose(2, 3).reshape(b, h, n, p)
    return decay, state


def ssd_combine(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The map of two stretches in turn: ``first`` then ``second``, each ``(A (b h), S (b h n p))``. Associative."""
    (decay_1, state_1), (decay_2, state_2) = first, second
    return decay_1 * decay_2, torch.addcmul(state_2, state_1, decay_2[..., None, None])
