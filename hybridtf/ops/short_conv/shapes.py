"""What both forms of the convolution check before they compute."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError, known_names
from hybridtf.core.segments import Segments
from hybridtf.ops.documents import carried_state


def check(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, segments: Segments | None,
    activation: str | None,
) -> None:
    """Raise :class:`ConfigError` where the arguments do not fit: x (b t c), weight (c w), bias (c), state (b w-1 c)."""
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] < 1:
        got = f"{tuple(x.shape)} and {tuple(weight.shape)}"
        raise ConfigError(f"short_conv: x must be (b t c) and weight (c w); got {got}")
    (b, t, c), width = x.shape, weight.shape[1]
    if bias is not None and bias.shape != (c,):
        raise ConfigError(f"short_conv: bias must be (c) = {(c,)}; got {tuple(bias.shape)}")
    if initial_state is not None and initial_state.shape != (b, width - 1, c):
        raise ConfigError(
            f"short_conv: initial_state must be (b w-1 c) = {(b, width - 1, c)}, the past tokens alone; "
            f"got {tuple(initial_state.shape)}"
        )
    if segments is not None and segments.ids.shape != (b, t):
        raise ConfigError(f"short_conv: segments must be (b t) = {(b, t)}; got {tuple(segments.ids.shape)}")
    if activation not in (None, "silu"):
        raise ConfigError(f"short_conv: no activation named {activation!r}. {known_names(activation, ['silu'])}")


def sum_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The precision of the sum over the taps: float32, or float64 where an input is float64."""
    return torch.float64 if torch.float64 in (x.dtype, weight.dtype) else torch.float32


def start_state(initial_state: Tensor | None, x: Tensor, width: int, segments: Segments | None) -> Tensor:
    """The incoming tokens (b w-1 c) in x's dtype: zeros where there are none or the row begins another document."""
    if initial_state is None:
        return x.new_zeros(x.shape[0], width - 1, x.shape[2])
    return carried_state(initial_state, x.dtype, segments)
