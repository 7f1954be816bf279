"""What every form of the op checks before it computes, and the sizes of a call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.documents import carried_state, mask_pads


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
    b, t, n, g, h, width, p = sizes_of(k, v)
    if n == 0 or g == 0 or h % g:
        raise ConfigError(f"{name}: {n} sub-steps (1 or more), and {h} value heads, a multiple of {g} key heads")
    if q is not None and q.shape != (b, t, g, width):
        raise ConfigError(f"{name}: q must be (b t g k) = {(b, t, g, width)}; got {tuple(q.shape)}")
    if beta.shape != v.shape[:-1]:
        raise ConfigError(f"{name}: beta must be v less its width, {tuple(v.shape[:-1])}; got {tuple(beta.shape)}")
    if log_a is not None and log_a.shape not in ((b, t, h), (b, t, h, width)):
        raise ConfigError(f"{name}: log_a must be (b t h) = {(b, t, h)}, or (b t h k), k = {width}; got {tuple(log_a.shape)}")
    if initial_state is not None and initial_state.shape != (b, h, width, p):
        raise ConfigError(f"{name}: initial_state must be (b h k p) = {(b, h, width, p)}; got {tuple(initial_state.shape)}")
    if segments is not None and segments.ids.shape != (b, t):
        raise ConfigError(f"{name}: segments must be (b t) = {(b, t)}; got {tuple(segments.ids.shape)}")
    if chunk_size < 1:
        raise ConfigError(f"{name}: chunk_size must be 1 or more; got {chunk_size}")


def start_state(
    initial_state: Tensor | None, k: Tensor, v: Tensor, dtype: torch.dtype, segments: Segments | None
) -> Tensor:
    """The incoming state (b h k p) in ``dtype``: zeros where there is none, and in rows that begin another document."""
    if initial_state is None:
        b, _, _, _, h, width, p = sizes_of(k, v)
        return v.new_zeros(b, h, width, p, dtype=dtype)
    return carried_state(initial_state, dtype, segments)


def log_steps(log_a: Tensor | None, segments: Segments | None, dtype: torch.dtype) -> Tensor | None:
    """``log_a`` for sums: no decay at pads, and no -inf: exp(-1000) is 0 in float64 too: the bound changes nothing."""
    return None if log_a is None else mask_pads(log_a, segments).to(dtype).clamp(min=-1000.0)
