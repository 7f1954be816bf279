"""A stretch of ``selective_scan`` as an affine map of the state, so that a sequence can be split over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import mask_pads, state_dtype
from hybridtf.ops.selective_scan.chunked import selective_scan_chunked
from hybridtf.ops.selective_scan.shapes import check


def selective_scan_summary(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *, segments: Segments | None = None, chunk_size: int = 64
) -> tuple[Tensor, Tensor]:
    """What a stretch does to the state it is given: h_out = a * h_in + s, elementwise.

    ``x``, ``dt`` (b t c), ``A`` (c n), ``B`` (b t n) or (b t g n). Returns ``a`` (b c n), zero for rows whose last document
    is not the incoming one, and ``s`` (b c n), both float32 or float64. ``dt`` is summed in float64. Raises
    :class:`ConfigError` where shapes do not fit.
    """
    check(x, dt, A, B, segments=segments, chunk_size=chunk_size)
    dtype = state_dtype(x, dt, A, B)
    with no_autocast(x.device):
        total = mask_pads(dt, segments).double().sum(1)
        decay = (total[..., None] * A.double()).exp().to(dtype)
        if segments is not None:
            decay = decay.masked_fill(~segments.keeps_state[:, None, None], 0)
    # The state that is left of an empty one; what is read on the way (with B for C) is not used.
    state = selective_scan_chunked(x, dt, A, B, B, segments=segments, chunk_size=chunk_size)[1]
    return decay, state


def selective_scan_combine(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The map of two stretches in turn: ``first`` then ``second``, each ``(a, s)``, both (b c n). Associative."""
    (decay_1, state_1), (decay_2, state_2) = first, second
    return decay_1 * decay_2, torch.addcmul(state_2, state_1, decay_2)
