"""What every form of the op checks before it computes: shapes that fit together; and the state it starts from."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.documents import carried_state


def check(
    k: Tensor, v: Tensor, log_w: Tensor, u: Tensor, r: Tensor, *, q: Tensor | None = None,
    initial_state: Tensor | None = None, segments: Segments | None = None, chunk_size: int = 1,
) -> None:
    """Raise :class:`ConfigError` where the arguments do not fit: keys (b t h k), v (b t h p), log_w (b t h k or 1)."""
    if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
        raise ConfigError(f"dplr: k must be (b t h k) and v (b t h p); got {tuple(k.shape)} and {tuple(v.shape)}")
    (b, t, h, n), p = k.shape, v.shape[3]
    for name, x in (("q", q), ("u", u), ("r", r)):
        if x is not None and x.shape != k.shape:
            raise ConfigError(f"dplr: {name} must have the shape of k {tuple(k.shape)}; got {tuple(x.shape)}")
    if log_w.shape not in ((b, t, h, n), (b, t, h, 1)):
        shapes = f"{(b, t, h, n)}, or {(b, t, h, 1)} for one decay a head"
        raise ConfigError(f"dplr: log_w must be {shapes}; got {tuple(log_w.shape)}")
    if initial_state is not None and initial_state.shape != (b, h, n, p):
        raise ConfigError(f"dplr: initial_state must be (b h k p) = {(b, h, n, p)}; got {tuple(initial_state.shape)}")
    if segments is not None and segments.ids.shape != (b, t):
        raise ConfigError(f"dplr: segments must be (b t) = {(b, t)}; got {tuple(segments.ids.shape)}")
    if chunk_size < 1:
        raise ConfigError(f"dplr: chunk_size must be 1 or more; got {chunk_size}")


def start_state(
    initial_state: Tensor | None, k: Tensor, v: Tensor, dtype: torch.dtype, segments: Segments | None
) -> Tensor:
    """The incoming state (b h k p) in ``dtype``: zeros where there is none, and in rows that begin another document."""
    if initial_state is None:
        return v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=dtype)
    return carried_state(initial_state, dtype, segments)
