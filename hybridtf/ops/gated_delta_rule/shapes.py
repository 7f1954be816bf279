"""What every form of the op checks before it computes, and the sizes of a call."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.checks import check_count, check_segments, check_shape
from hybridtf.ops.documents import memory_shape


class Sizes(NamedTuple):
    """b rows, t tokens, n sub-steps a token, g key heads, h value heads, k key width, p value width."""

    b: int
    t: int
    n: int
    g: int
    h: int
    k: int
    p: int

    @property
    def r(self) -> int:
        """Value heads of a key head."""
        return self.h // self.g


def sizes_of(k: Tensor, v: Tensor) -> Sizes:
    """Of k (b t g k) and v (b t h p), or (b t n g k) and (b t n h p)."""
    b, t, *steps, g, width = k.shape
    return Sizes(b, t, steps[0] if steps else 1, g, v.shape[-2], width, v.shape[-1])


def check(
    k: Tensor, v: Tensor, beta: Tensor, log_a: Tensor | None, *, q: Tensor | None = None,
    initial_state: Tensor | None = None, segments: Segments | None = None, chunk_size: int = 1,
) -> None:
    """Raise :class:`ConfigError` where the arguments do not fit; see :func:`gated_delta_rule_reference`."""
    name = "gated_delta_rule"
    if k.ndim not in (4, 5) or v.ndim != k.ndim or k.shape[: k.ndim - 2] != v.shape[: v.ndim - 2]:
        raise ConfigError(
            f"{name}: k must be (b t g k) and v (b t h p), or (b t n g k) and (b t n h p) with sub-steps; "
            f"got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    b, t, n, g, h, width, _ = sizes_of(k, v)
    if n == 0 or g == 0 or h % g:
        raise ConfigError(f"{name}: {n} sub-steps (1 or more), and {h} value heads, a multiple of {g} key heads")
    check_shape(name, "q", q, "(b t g k)", (b, t, g, width))
    if beta.shape != v.shape[:-1]:
        raise ConfigError(f"{name}: beta must be v less its width, {tuple(v.shape[:-1])}; got {tuple(beta.shape)}")
    if log_a is not None and log_a.shape not in ((b, t, h), (b, t, h, width)):
        raise ConfigError(f"{name}: log_a must be (b t h) = {(b, t, h)}, or (b t h k), k = {width}; got {tuple(log_a.shape)}")
    check_shape(name, "initial_state", initial_state, "(b h k p)", memory_shape(k, v))
    check_segments(name, segments, b, t)
    check_count(name, "chunk_size", chunk_size)
