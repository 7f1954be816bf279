"""Sums of log forget gates over a document, for attention that fades (``decay`` of what is held).

Axes: b batch, t time, h heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.core import Growing, Segments
from hybridtf.nn.norms import accumulation_dtype
from hybridtf.nn.positions.angles import wide_dtype
from hybridtf.ops.documents import mask_pads, running_sum


def forget_sums(logits: Tensor, segments: Segments | None, leaf: Growing | None) -> Tensor:
    """(b t h) the sums of log sigmoid(logits) up to each token of its document, ``leaf`` holding those before as ``decay``.

    In float64 where the device has it: a long sum has no digits left for differences in float32.
    """
    log_f = F.logsigmoid(logits.to(accumulation_dtype(logits.dtype))).to(wide_dtype(logits.device))
    return running_sum(mask_pads(log_f, segments), _last_sum(leaf, log_f), segments)


def _last_sum(leaf: Growing | None, like: Tensor) -> Tensor:
    """(b h) the sum that the state's last token has; 0 where it has none. ``like`` (b t h)."""
    if leaf is None or not leaf.capacity:
        return like.new_zeros(like.shape[0], like.shape[2])
    sums = leaf["decay"].to(like.dtype)
    last = (leaf.length - 1).clamp(min=0)[:, None, None].expand(-1, 1, sums.shape[2])
    return torch.where((leaf.length > 0)[:, None], sums.gather(1, last)[:, 0], 0.0)
