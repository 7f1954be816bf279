"""What every form of ``mesa`` checks before it computes, and the state it starts from."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.documents import carried_state


def check(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_a: Tensor, ridge: Tensor, initial_state: Tensor | None,
    segments: Segments | None, chunk_size: int, n_steps: int,
) -> None:
    """Raise :class:`ConfigError` where the arguments do not fit."""
    if k.ndim != 4 or q.shape != k.shape or v.ndim != 4 or v.shape[:3] != k.shape[:3]:
        found = [tuple(x.shape) for x in (q, k, v)]
        raise ConfigError(f"mesa: q and k must be (b t h k), v (b t h v); got {found[0]}, {found[1]} and {found[2]}")
    b, t, h, n = k.shape
    wanted = {"beta": (beta, (b, t, h)), "log_a": (log_a, (b, t, h)), "ridge": (ridge, (h, n))}
    if initial_state is not None:
        wanted["initial_state"] = (initial_state, (b, h, n, n + v.shape[3]))
    for name, (x, shape) in wanted.items():
        if x.shape != shape:
            raise ConfigError(f"mesa: {name} must be {shape}; got {tuple(x.shape)}")
    if segments is not None and segments.ids.shape != (b, t):
        raise ConfigError(f"mesa: segments must be (b t) = {(b, t)}; got {tuple(segments.ids.shape)}")
    for name, number in (("chunk_size", chunk_size), ("n_steps", n_steps)):
        if number < 1:
            raise ConfigError(f"mesa: {name} must be 1 or more; got {number}")


def start_state(
    initial_state: Tensor | None, k: Tensor, v: Tensor, dtype: torch.dtype, segments: Segments | None
) -> Tensor:
    """The incoming state (b h k k+v) in ``dtype``: zeros where there is none, and in rows that begin another document."""
    if initial_state is None:
        (b, _, h, n), p = k.shape, v.shape[3]
        return v.new_zeros(b, h, n, n + p, dtype=dtype)
    return carried_state(initial_state, dtype, segments)
