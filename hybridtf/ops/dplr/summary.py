"""A stretch of ``dplr`` as an affine map of the state, so that a sequence can be split over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import state_dtype
from hybridtf.ops.dplr.maps import chunk_maps
from hybridtf.ops.dplr.shapes import check
from hybridtf.ops.dplr.spans import in_chunks
from hybridtf.ops.passes_op import Call, Masks


def dplr_summary(
    k: Tensor, v: Tensor, log_w: Tensor, u: Tensor, r: Tensor, *, segments: Segments | None = None, chunk_size: int = 32
) -> tuple[Tensor, Tensor]:
    """What a stretch does to the state it is given: S_out = A S_in + S.

    Arguments as :func:`dplr_reference`. Returns ``A`` (b h k k), zero for rows whose last document is not the incoming one,
    and ``S`` (b h k p), both float32 or float64. Raises :class:`ConfigError` where shapes do not fit.
    """
    check(k, v, log_w, u, r, segments=segments, chunk_size=chunk_size)
    dtype = state_dtype(k, v, log_w, u, r)
    (b, _, h, n), p = k.shape, v.shape[3]
    masks = None if segments is None else Masks(segments.real, segments.effective, segments.carried)
    timed = {"q": torch.zeros_like(k), "k": k, "v": v, "log_w": log_w, "u": u, "r": r}
    total = (torch.eye(n, dtype=dtype, device=k.device).expand(b, h, n, n), v.new_zeros(b, h, n, p, dtype=dtype))
    if not k.shape[1]:
        return total
    with no_autocast(v.device):
        tokens, documents = in_chunks(Call(timed, {}, {"chunk_size": chunk_size}, masks))
        maps = chunk_maps(tokens, documents)
        of_chunks = (z.unflatten(0, tokens.k.shape[:3]).unbind(0) for z in (maps.A, maps.B))
        for step in zip(*of_chunks, strict=True):
            total = dplr_combine(total, step)
    return total


def dplr_combine(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The map of two stretches in turn: ``first`` then ``second``, each ``(A (b h k k), S (b h k p))``. Associative."""
    (a_1, state_1), (a_2, state_2) = first, second
    return a_2 @ a_1, a_2 @ state_1 + state_2
