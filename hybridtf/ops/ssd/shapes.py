"""What every form of the op checks before it computes: shapes that fit together."""

from __future__ import annotations

from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.checks import check_count, check_segments, check_shape
from hybridtf.ops.documents import memory_shape


def check(
    k: Tensor, v: Tensor, log_a: Tensor, *, q: Tensor | None = None, initial_state: Tensor | None = None,
    segments: Segments | None = None, chunk_size: int = 1,
) -> None:
    """Raise :class:`ConfigError` where the arguments do not fit: k (b t g n), v (b t h p), log_a (b t h)."""
    if k.ndim != 4 or v.ndim != 4 or k.shape[:2] != v.shape[:2]:
        raise ConfigError(f"ssd: k must be (b t g n) and v (b t h p); got {tuple(k.shape)} and {tuple(v.shape)}")
    (b, t, g), h = k.shape[:3], v.shape[2]
    if g == 0 or h % g:
        raise ConfigError(f"ssd: the {h} heads of v must be a multiple of the {g} groups of k")
    if q is not None and q.shape != k.shape:
        raise ConfigError(f"ssd: q must have the shape of k {tuple(k.shape)}; got {tuple(q.shape)}")
    check_shape("ssd", "log_a", log_a, "(b t h)", (b, t, h))
    check_shape("ssd", "initial_state", initial_state, "(b h n p)", memory_shape(k, v))
    check_segments("ssd", segments, b, t)
    check_count("ssd", "chunk_size", chunk_size)
