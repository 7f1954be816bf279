"""What every form of the op checks before it computes: shapes that fit together."""

from __future__ import annotations

from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.checks import check_count, check_segments, check_shape
from hybridtf.ops.documents import memory_shape


def check(
    k: Tensor, v: Tensor, log_w: Tensor, u: Tensor, r: Tensor, *, q: Tensor | None = None,
    initial_state: Tensor | None = None, segments: Segments | None = None, chunk_size: int = 1,
) -> None:
    """Raise :class:`ConfigError` where the arguments do not fit: keys (b t h k), v (b t h p), log_w (b t h k or 1)."""
    if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
        raise ConfigError(f"dplr: k must be (b t h k) and v (b t h p); got {tuple(k.shape)} and {tuple(v.shape)}")
    b, t, h, n = k.shape
    for name, x in (("q", q), ("u", u), ("r", r)):
        if x is not None and x.shape != k.shape:
            raise ConfigError(f"dplr: {name} must have the shape of k {tuple(k.shape)}; got {tuple(x.shape)}")
    if log_w.shape not in ((b, t, h, n), (b, t, h, 1)):
        shapes = f"{(b, t, h, n)}, or {(b, t, h, 1)} for one decay a head"
        raise ConfigError(f"dplr: log_w must be {shapes}; got {tuple(log_w.shape)}")
    check_shape("dplr", "initial_state", initial_state, "(b h k p)", memory_shape(k, v))
    check_segments("dplr", segments, b, t)
    check_count("dplr", "chunk_size", chunk_size)
