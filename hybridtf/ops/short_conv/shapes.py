"""What both forms of the convolution check before they compute."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError, known_names
from hybridtf.core.segments import Segments
from hybridtf.ops.checks import check_segments, check_shape


def check(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, segments: Segments | None,
    activation: str | None,
) -> None:
    """Raise :class:`ConfigError` where the arguments do not fit: x (b t c), weight (c w), bias (c), state (b w-1 c)."""
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] < 1:
        got = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        raise ConfigError(f"short_conv: x must be (b t c) and weight (c w); got {got}")
    (b, t, c), width = x.shape, weight.shape[1]
    check_shape("short_conv", "bias", bias, "(c)", (c,))
    if initial_state is not None and initial_state.shape != (b, width - 1, c):
        raise ConfigError(
            f"short_conv: initial_state must be (b w-1 c) = {(b, width - 1, c)}, the past tokens alone; "
            f"got {tuple(initial_state.shape)}"
        )
    check_segments("short_conv", segments, b, t)
    if activation not in (None, "silu"):
        raise ConfigError(f"short_conv: no activation named {activation!r}. {known_names(activation, ['silu'])}")


def sum_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The precision of the sum over the taps: float32, or float64 where an input is float64."""
    return torch.float64 if torch.float64 in (x.dtype, weight.dtype) else torch.float32
