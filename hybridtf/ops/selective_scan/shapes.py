"""What every form of the op checks before it computes."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.documents import carried_state


def check(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *, C: Tensor | None = None, D: Tensor | None = None,
    initial_state: Tensor | None = None, segments: Segments | None = None, chunk_size: int = 1,
) -> None:
    """Raise :class:`ConfigError` where the arguments do not fit: x, dt (b t c), A (c n), B, C (b t n) or (b t g n)."""
    if x.ndim != 3 or dt.shape != x.shape:
        raise ConfigError(f"selective_scan: x and dt must be (b t c) alike; got {tuple(x.shape)} and {tuple(dt.shape)}")
    b, t, c = x.shape
    if A.ndim != 2 or A.shape[0] != c:
        raise ConfigError(f"selective_scan: A must be (c n) with c = {c}; got {tuple(A.shape)}")
    n = A.shape[1]
    if B.ndim not in (3, 4) or B.shape[:2] != (b, t) or B.shape[-1] != n:
        raise ConfigError(f"selective_scan: B must be (b t n) = {(b, t, n)} or (b t g n); got {tuple(B.shape)}")
    groups = B.shape[2] if B.ndim == 4 else 1
    if groups == 0 or c % groups:
        raise ConfigError(f"selective_scan: the {c} channels of x must be a multiple of the {groups} groups of B")
    if C is not None and C.shape != B.shape:
        raise ConfigError(f"selective_scan: C must have the shape of B {tuple(B.shape)}; got {tuple(C.shape)}")
    if D is not None and D.shape != (c,):
        raise ConfigError(f"selective_scan: D must be (c) = {(c,)}; got {tuple(D.shape)}")
    if initial_state is not None and initial_state.shape != (b, c, n):
        raise ConfigError(
            f"selective_scan: initial_state must be (b c n) = {(b, c, n)}; got {tuple(initial_state.shape)}"
        )
    if segments is not None and segments.ids.shape != (b, t):
        raise ConfigError(f"selective_scan: segments must be (b t) = {(b, t)}; got {tuple(segments.ids.shape)}")
    if chunk_size < 1:
        raise ConfigError(f"selective_scan: chunk_size must be 1 or more; got {chunk_size}")


def start_state(
    initial_state: Tensor | None, x: Tensor, A: Tensor, dtype: torch.dtype, segments: Segments | None
) -> Tensor:
    """The incoming state (b c n) in ``dtype``: zeros where there is none, and in rows that begin another document."""
    if initial_state is None:
        return x.new_zeros(x.shape[0], *A.shape, dtype=dtype)
    return carried_state(initial_state, dtype, segments)


def by_group(B: Tensor) -> Tensor:
    """B or C as (b t g n)."""
    return B if B.ndim == 4 else B[:, :, None]
