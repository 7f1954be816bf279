"""A weighted sum of values in three parts, so that no weight overflows; what every form of the op checks.

Axes: b batch, t time, c channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.ops.checks import check_count, check_segments
from hybridtf.ops.documents import carried_state

LOW = -1e38
"""The exponent of an empty sum: finite, so that the difference of two is 0 and not NaN."""


class Sums(NamedTuple):
    """exp(max) num and exp(max) den are the sums of weighted values and of weights; den = 0: there is nothing yet."""

    num: Tensor
    den: Tensor
    max: Tensor


def merged(*parts: Sums) -> Sums:
    """The sum of all parts, which are of one shape once broadcast."""
    top = parts[0].max
    for part in parts[1:]:
        top = torch.maximum(top, part.max)
    weights = [(part.max - top).exp() for part in parts]
    num = sum((w * part.num for w, part in zip(weights[1:], parts[1:], strict=True)), weights[0] * parts[0].num)
    den = sum((w * part.den for w, part in zip(weights[1:], parts[1:], strict=True)), weights[0] * parts[0].den)
    return Sums(num, den, top)


def shifted(sums: Sums, log_weight: Tensor, where: Tensor | None) -> Sums:
    """Every weight times exp(log_weight); nothing where ``where`` is False (None: it is True)."""
    top = sums.max + log_weight
    return Sums(sums.num, sums.den, top if where is None else torch.where(where, top, LOW))


def check(
    k: Tensor, v: Tensor, log_w: Tensor, u: Tensor, initial_state: tuple[Tensor, Tensor, Tensor] | None,
    segments: Segments | None, chunk_size: int,
) -> None:
    """Raise :class:`ConfigError` where the arguments do not fit: k, v (b t c), log_w, u (c), three states (b c)."""
    if k.ndim != 3 or v.shape != k.shape:
        raise ConfigError(f"wkv: k and v must be (b t c), both the same; got {tuple(k.shape)} and {tuple(v.shape)}")
    b, t, c = k.shape
    for name, x in (("log_w", log_w), ("u", u)):
        if x.shape != (c,):
            raise ConfigError(f"wkv: {name} must be (c) = {(c,)}; got {tuple(x.shape)}")
    if initial_state is not None and [tuple(x.shape) for x in initial_state] != [(b, c)] * 3:
        shapes = [tuple(x.shape) for x in initial_state]
        raise ConfigError(f"wkv: initial_state must be num, den and max, each (b c) = {(b, c)}; got {shapes}")
    check_segments("wkv", segments, b, t)
    check_count("wkv", "chunk_size", chunk_size)


def opened(
    initial_state: tuple[Tensor, Tensor, Tensor] | None, k: Tensor, dtype: torch.dtype, segments: Segments | None
) -> Sums:
    """The incoming state in ``dtype``: empty where there is none, and in rows that begin another document."""
    if initial_state is None:
        zero = k.new_zeros(k.shape[0], k.shape[2], dtype=dtype)
        return Sums(zero, zero.clone(), torch.full_like(zero, LOW))
    num, den, top = (carried_state(x, dtype, segments) for x in initial_state)
    return Sums(num, den, torch.where(den > 0, top, LOW))


def closed(sums: Sums) -> tuple[Tensor, Tensor, Tensor]:
    """The state to hand out: zeros where there is nothing yet."""
    return sums.num, sums.den, sums.max.masked_fill(sums.den <= 0, 0)
