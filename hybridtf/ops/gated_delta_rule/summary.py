"""A stretch of ``gated_delta_rule`` as an affine map of the state, so that a sequence can be split over ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import state_dtype
from hybridtf.ops.gated_delta_rule.chunked import gated_delta_rule_chunked
from hybridtf.ops.gated_delta_rule.shapes import check, sizes_of


def gated_delta_rule_summary(
    k: Tensor, v: Tensor, beta: Tensor, log_a: Tensor | None = None, *, segments: Segments | None = None, chunk_size: int = 64
) -> tuple[Tensor, Tensor]:
    """What a stretch does to the state it is given: S_out = A S_in + S; arguments as in :func:`gated_delta_rule_reference`.

    Returns ``A`` (b h k k), zero for rows whose last document is not the incoming one, and ``S`` (b h k p), both float32 or
    float64. Columns of a state do not mix: A is what becomes of the identity when nothing is to be stored, and passes
    beside S as k more columns of values.
    """
    check(k, v, beta, log_a, segments=segments, chunk_size=chunk_size)
    b, t, _, g, h, width, p = sizes_of(k, v)
    dtype = state_dtype(k, v, beta, log_a)
    eye = torch.eye(width, dtype=dtype, device=v.device).expand(b, h, -1, -1)
    start = torch.cat([eye.new_zeros(b, h, width, p), eye], -1)
    _, last = gated_delta_rule_chunked(
        k.new_zeros(b, t, g, width), k, F.pad(v, (0, width)), beta, log_a, initial_state=start, segments=segments,
        chunk_size=chunk_size,
    )
    return last[..., p:], last[..., :p]


def gated_delta_rule_combine(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The map of two stretches in turn: ``first`` then ``second``, each ``(A (b h k k), S (b h k p))``. Associative."""
    (decay_1, state_1), (decay_2, state_2) = first, second
    return decay_2 @ decay_1, decay_2 @ state_1 + state_2
