"""What every form of ``mesa`` checks before it computes."""

from __future__ import annotations

from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.checks import check_count, check_segments


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
        wanted["initial_state"] = (initial_state, state_shape(k, v))
    for name, (x, shape) in wanted.items():
        if x.shape != shape:
            raise ConfigError(f"mesa: {name} must be {shape}; got {tuple(x.shape)}")
    check_segments("mesa", segments, b, t)
    for name, number in (("chunk_size", chunk_size), ("n_steps", n_steps)):
        check_count("mesa", name, number)


def state_shape(k: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """(b h k k+v) of k (b t h k) and v (b t h v)."""
    b, _, h, n = k.shape
    return b, h, n, n + v.shape[3]
