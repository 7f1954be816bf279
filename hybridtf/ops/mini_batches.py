"""Where mini-batches lie: m tokens each, counted from the document's start, in chunks of m columns that begin anywhere.

A chunk then has tokens of at most two mini-batches of the document that the state belongs to, and no document that begins in
the chunk gets beyond its first.

Axes: b batch, t time, c chunks, l = m places in a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.core.segments import Segments


class Numbers(NamedTuple):
    """The mini-batches of a chunk, counted from its first token's: 0, 1, ..."""

    of: Tensor  # (c b l): each token's; a pad's is that of the token before it
    carried: Tensor  # (c b l) bool: it is of the state's document
    ends: Tensor  # (c b l) bool: the token is its mini-batch's last
    keeps: Tensor  # (c b 1) bool: the chunk's first token goes on with the state's document


def places(x: Tensor, m: int, before: Tensor, segments: Segments | None) -> Tensor:
    """(b t) the place of each token of x (b t ...) in its mini-batch; ``before`` (b): tokens of the open one so far."""
    if segments is not None:
        return segments.positions(before) % m
    return (torch.arange(x.shape[1], device=x.device) + before[:, None]) % m


def in_chunks(x: Tensor, m: int) -> Tensor:
    """(b t ...) to (c b l ...), filled up with zeros."""
    t = x.shape[1]
    whole: Tensor = F.pad(x, [0, 0] * (x.ndim - 2) + [0, -t % m]).unflatten(1, (-(-t // m), m))
    return whole.transpose(0, 1)


def numbers(place: Tensor, real: Tensor, starts: Tensor, m: int) -> Numbers:
    """Of chunks, all (c b l): the place of each token in its mini-batch, True at real tokens, True where a document begins."""
    ahead = real & (real.cumsum(-1) == 1)
    of = (real & (place == 0) & ~ahead).cumsum(-1)
    keeps = ~(starts & ahead).any(-1, keepdim=True)
    return Numbers(of, keeps & (starts.cumsum(-1) == 0), real & (place == m - 1), keeps)
