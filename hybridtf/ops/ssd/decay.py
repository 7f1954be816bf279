"""The factors of a span of chunks that come from decays and documents.

Axes: b batch, c chunks of a span, l places in a chunk, g groups, r heads a group, h = g r.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtf.ops.exponential import exp, exp_, factors
from hybridtf.ops.passes_op import Masks
from hybridtf.ops.spans import Span


class Decay(NamedTuple):
    """Factors between 0 and 1."""

    pair: Tensor  # (b c g r l l): from the place of the last axis to that of the one before, 0 above the diagonal
    into: Tensor  # (b c l h 1): from the chunk's incoming state to the place
    tail: Tensor  # (b c l h 1): from the place to the chunk's outgoing state
    whole: Tensor  # (b c g 1 r 1): from incoming to outgoing state


def decay_of(log_a: Tensor, masks: Masks | None, groups: int, place: Span) -> Decay:
    """The factors of a span with ``log_a`` (b t h). Only exponents of at most 0 are raised: a masked pair is 0, never a
    large number."""
    dtype = log_a.dtype
    total = place.cut(log_a).double().cumsum(2)
    into, tail, whole = total.exp(), (total[:, :, -1:] - total).exp(), total[:, :, -1].exp()
    by_head = total.transpose(2, 3).contiguous()
    pair = (by_head[..., :, None] - by_head[..., None, :]).to(dtype)
    seen = torch.ones(place.length, place.length, dtype=dtype, device=pair.device).tril()
    if masks is not None:
        ids = place.cut(masks.ids)
        before = torch.cat([masks.before[:, None], ids[:, :-1, -1]], 1)
        seen = (seen * (ids[..., :, None] == ids[..., None, :]))[:, :, None]
        into = into.masked_fill((ids != before[..., None])[..., None], 0)
        tail = tail.masked_fill((ids != ids[:, :, -1:])[..., None], 0)
        whole = whole.masked_fill((ids[:, :, -1] != before)[..., None], 0)
    # By products, since filling by a mask takes as long as all the rest; in place where no gradient looks back.
    pair = exp(pair * seen) * seen if pair.requires_grad else exp_(pair.mul_(seen)).mul_(seen)
    b, c, h = whole.shape
    heads = h // groups
    into, tail, whole = (factors(x, dtype) for x in (into, tail, whole))
    pair = pair.view(b, c, groups, heads, place.length, place.length)
    return Decay(pair, into[..., None], tail[..., None], whole.view(b, c, groups, 1, heads, 1))
