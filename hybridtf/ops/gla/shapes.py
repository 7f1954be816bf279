"""What every form of ``gla`` checks before it computes: shapes that fit together."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import Tensor

from hybridtf.core.errors import ConfigError, known_names
from hybridtf.core.segments import Segments
from hybridtf.ops.checks import check_count, check_segments, check_shape
from hybridtf.ops.documents import memory_shape

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
        check_shape("gla", "bonus", bonus, "(h k)", tuple(q.shape[2:]))
    check_shape("gla", "log_a", log_a, f"(b t g {decay})", (b, t, g, n if decay == "keys" else p))
    check_shape("gla", "initial_state", initial_state, "(b g k v)", memory_shape(k, v))
    check_segments("gla", segments, b, t)
    check_count("gla", "chunk_size", chunk_size)
