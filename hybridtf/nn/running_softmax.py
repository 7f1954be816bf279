"""The softmax over time as it stands at each token: what each token weighs, and how much less all before it.

Axes: b batch, t time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.core import Segments

# exp(-60) is lost in float64 beside 1: documents that lie that far apart do not see each other.
_APART = 60.0
_NOTHING = -1e4


class RunningSoftmax(NamedTuple):
    """softmax(x_1 ... x_t) at s is ``weight_s`` times exp(``log_kept``) of all tokens after s up to t."""

    weight: Tensor
    log_kept: Tensor
    """At most 0. A document's first token keeps nothing of what was before: see the op that it is given to."""
    total: Tensor
    """(b ...) the logarithm of the sum of exp(x) over each row's last document, in float64; 0 where it has no token yet."""


def running_softmax(x: Tensor, before: Tensor | None, length: Tensor | None, segments: Segments | None) -> RunningSoftmax:
    """``x`` (b t ...), above -5000; ``before`` (b ...), the ``total`` of an earlier call, of ``length`` (b) tokens.

    Sums are float64: one running sum over the row, in which each document is raised so far above those before it that they
    count for nothing. Weights and decays have the dtype of ``x``.
    """
    (b, t), ones = x.shape[:2], [1] * (x.ndim - 2)
    wide, empty = x.double(), x.new_full((b, 1, *x.shape[2:]), _NOTHING, dtype=torch.float64)
    start = empty if before is None else before.double()[:, None]
    if length is not None:
        held = length > 0
        if segments is not None:
            held = held & (segments.continues | (segments.last_id == 0))
        start = torch.where(held.view(b, 1, *ones), start, empty)
    lift = torch.zeros_like(empty)
    if segments is not None:
        wide = wide.masked_fill(~segments.real.view(b, t, *ones), _NOTHING)
        number = F.pad(segments.starts.cumsum(1), (1, 0)).view(b, t + 1, *ones)
        lift = number * _step(wide, start)
    raised = torch.cat([start, wide], 1) + lift
    total = raised.logcumsumexp(1) - lift
    log_kept = (total[:, :-1] - total[:, 1:]).clamp(max=0)
    if segments is not None:
        log_kept = log_kept.masked_fill((segments.starts | ~segments.real).view(b, t, *ones), 0)
    last = total[:, -1]
    last = torch.where(last > _NOTHING / 2, last, 0.0)
    return RunningSoftmax((wide - total[:, 1:]).exp().to(x.dtype), log_kept.to(x.dtype), last)


def _step(x: Tensor, start: Tensor) -> Tensor:
    """(b 1 ...) how far apart documents must be: the range of all numbers that count, and more."""
    all_of = torch.cat([start, x], 1).detach()
    counts = all_of > _NOTHING / 2
    high = all_of.masked_fill(~counts, -torch.inf).amax(1, keepdim=True)
    low = all_of.masked_fill(~counts, torch.inf).amin(1, keepdim=True)
    return torch.where(counts.any(1, keepdim=True), high - low, 0.0) + _APART
