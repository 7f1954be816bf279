"""A stretch of ``gla`` as an affine map of the state, so that a sequence can be split over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import log_steps, mask_pads, state_dtype
from hybridtf.ops.gla.shapes import DecayOf, check


def gla_summary(
    k: Tensor, v: Tensor, log_a: Tensor, *, segments: Segments | None = None, decay: DecayOf = "keys"
) -> tuple[Tensor, Tensor]:
    """What a stretch does to the state it is given: S_out = A S_in + S, elementwise in A.

    ``k`` (b t g k), ``v`` (b t g v), ``log_a`` as in :func:`gla_reference`. Returns ``A`` (b g k 1), or (b g 1 v) with
    ``decay`` "values", zero for rows whose last document is not the incoming one, and ``S`` (b g k v), both float32 or
    float64. ``log_a`` is summed in float64. Raises :class:`ConfigError` where shapes do not fit.
    """
    check(k, v, log_a, segments=segments, decay=decay)
    dtype = state_dtype(k, v, log_a)
    with no_autocast(v.device):
        steps = log_steps(log_a, segments, torch.float64)
        # What still follows each token, itself left out, so that every exponent is at most 0.
        after = steps.flip(1).cumsum(1).flip(1)
        whole = after[:, :1].exp() if steps.shape[1] else steps.new_ones(steps.shape[0], 1, *steps.shape[2:])
        weight = torch.cat([after[:, 1:], torch.zeros_like(after[:, :1])], 1).exp().to(dtype)
        whole = whole[:, 0].to(dtype)
        if segments is not None:
            whole = whole.masked_fill(~segments.keeps_state[:, None, None], 0)
            weight = weight.masked_fill(~segments.in_last[:, :, None, None], 0)
        keys, values = (mask_pads(x, segments).to(dtype) for x in (k, v))
        if decay == "keys":
            keys, whole = keys * weight, whole[..., :, None]
        else:
            values, whole = values * weight, whole[..., None, :]
        state = keys.permute(0, 2, 3, 1) @ values.transpose(1, 2)
    return whole, state


def gla_combine(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The map of two stretches in turn: ``first`` then ``second``, as :func:`gla_summary` gives them. Associative."""
    (decay_1, state_1), (decay_2, state_2) = first, second
    return decay_1 * decay_2, torch.addcmul(state_2, state_1, decay_2)
