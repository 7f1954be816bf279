"""What every form of the op checks before it computes."""

from __future__ import annotations

from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.checks import check_count, check_segments, check_shape


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
    check_shape("selective_scan", "D", D, "(c)", (c,))
    check_shape("selective_scan", "initial_state", initial_state, "(b c n)", (b, c, n))
    check_segments("selective_scan", segments, b, t)
    check_count("selective_scan", "chunk_size", chunk_size)



def by_group(B: Tensor) -> Tensor:
    """B or C as (b t g n)."""
    return B if B.ndim == 4 else B[:, :, None]
