"""What every form of ``gla`` checks before it computes: shapes that fit together, and decays fit for exponentials."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError, known_names
from hybridtf.core.segments import Segments
from hybridtf.ops.documents import carried_state, mask_pads

DecayOf: TypeAlias = Literal["keys", "values"]
DECAYS: tuple[DecayOf, ...] = ("keys", "values")


def check(
    k: Tensor, v: Tensor, log_a: Tensor, *, q: Tensor | None = None, bonus: Tensor | None = None,
    initial_state: Tensor | None = None, segments: Segments | None = None, chunk_size: int = 1, decay: str = "keys",
) -> None:
    """Raise :class:`ConfigError` where the arguments do not fit: k (b t g k), v (b t g v), log_a as the decay says."""
    if decay not in DECAYS:
        raise ConfigError(f"gla: no decay of {decay!r}. {known_names(decay, DECAYS)}")
    if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
        raise ConfigError(f"gla: k must be (b t g k) and v (b t g v); got {tuple(k.shape)} and {tuple(v.shape)}")
    (b, t, g, n), p = k.shape, v.shape[3]
    if q is not None:
        if q.ndim != 4 or (*q.shape[:2], q.shape[3]) != (b, t, n) or g == 0 or q.shape[2] % g:
            raise ConfigError(f"gla: q must be (b t h k) = {(b, t, 'h', n)}, h a multiple of {g}; got {tuple(q.shape)}")
        if bonus is not None and bonus.shape != q.shape[2:]:
            raise ConfigError(f"gla: bonus must be (h k) = {tuple(q.shape[2:])}; got {tuple(bonus.shape)}")
    wanted = (b, t, g, n if decay == "keys" else p)
    if log_a.shape != wanted:
        raise ConfigError(f"gla: log_a must be (b t g {decay}) = {wanted}; got {tuple(log_a.shape)}")
    if initial_state is not None and initial_state.shape != (b, g, n, p):
        raise ConfigError(f"gla: initial_state must be (b g k v) = {(b, g, n, p)}; got {tuple(initial_state.shape)}")
    if segments is not None and segments.ids.shape != (b, t):
        raise ConfigError(f"gla: segments must be (b t) = {(b, t)}; got {tuple(segments.ids.shape)}")
    if chunk_size < 1:
        raise ConfigError(f"gla: chunk_size must be 1 or more; got {chunk_size}")


def start_state(
    initial_state: Tensor | None, k: Tensor, v: Tensor, dtype: torch.dtype, segments: Segments | None
) -> Tensor:
    """The incoming state (b g k v) in ``dtype``: zeros where there is none, and in rows that begin another document."""
    if initial_state is None:
        return v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=dtype)
    return carried_state(initial_state, dtype, segments)


def log_steps(log_a: Tensor, segments: Segments | None, dtype: torch.dtype) -> Tensor:
    """``log_a`` for sums: no decay at pads, and no -inf: exp(-1000) is 0 in float64 too: the bound changes nothing."""
    return mask_pads(log_a, segments).to(dtype).clamp(min=-1000.0)
