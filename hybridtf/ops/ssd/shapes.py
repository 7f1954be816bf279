"""What every form of the op checks before it computes: shapes that fit together, and decays fit for sums."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.documents import carried_state, mask_pads


def check(
    k: Tensor, v: Tensor, log_a: Tensor, *, q: Tensor | None = None, initial_state: Tensor | None = None,
    segments: Segments | None = None, chunk_size: int = 1,
) -> None:
    """Raise :class:`ConfigError` where the arguments do not fit: k (b t g n), v (b t h p), log_a (b t h)."""
    if k.ndim != 4 or v.ndim != 4 or k.shape[:2] != v.shape[:2]:
        raise ConfigError(f"ssd: k must be (b t g n) and v (b t h p); got {tuple(k.shape)} and {tuple(v.shape)}")
    (b, t, g, n), (h, p) = k.shape, v.shape[2:]
    if g == 0 or h % g:
        raise ConfigError(f"ssd: the {h} heads of v must be a multiple of the {g} groups of k")
    if q is not None and q.shape != k.shape:
        raise ConfigError(f"ssd: q must have the shape of k {tuple(k.shape)}; got {tuple(q.shape)}")
    if log_a.shape != (b, t, h):
        raise ConfigError(f"ssd: log_a must be (b t h) = {(b, t, h)}; got {tuple(log_a.shape)}")
    if initial_state is not None and initial_state.shape != (b, h, n, p):
        raise ConfigError(f"ssd: initial_state must be (b h n p) = {(b, h, n, p)}; got {tuple(initial_state.shape)}")
    if segments is not None and segments.ids.shape != (b, t):
        raise ConfigError(f"ssd: segments must be (b t) = {(b, t)}; got {tuple(segments.ids.shape)}")
    if chunk_size < 1:
        raise ConfigError(f"ssd: chunk_size must be 1 or more; got {chunk_size}")


def start_state(
    initial_state: Tensor | None, k: Tensor, v: Tensor, dtype: torch.dtype, segments: Segments | None
) -> Tensor:
    """The incoming state (b h n p) in ``dtype``: zeros where there is none, and in rows that begin another document."""
    if initial_state is None:
        return v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=dtype)
    return carried_state(initial_state, dtype, segments)


def start_states(
    op: str, shapes: Mapping[str, tuple[int, ...]], initial_state: Mapping[str, Tensor] | None, like: Tensor,
    dtype: torch.dtype, segments: Segments | None,
) -> dict[str, Tensor]:
    """The same of an op whose state is several tensors, by name and shape; raises :class:`ConfigError` where one differs."""
    if initial_state is None:
        return {name: like.new_zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        given = initial_state.get(name)
        if given is None or given.shape != shape:
            got = None if given is None else tuple(given.shape)
            raise ConfigError(f"{op}: initial_state[{name!r}] must be {shape}; got {got}")
    return {name: carried_state(initial_state[name], dtype, segments) for name in shapes}


def log_steps(log_a: Tensor, segments: Segments | None, dtype: torch.dtype) -> Tensor:
    """``log_a`` for sums: no decay at pads, and no -inf: exp(-1000) is 0 in float64 too: the bound changes nothing."""
    return mask_pads(log_a, segments).to(dtype).clamp(min=-1000.0)
