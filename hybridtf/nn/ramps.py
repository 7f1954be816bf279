"""Starts that depend on the layer's place: patterns over the channels, without chance (RWKV, sLSTM)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from hybridtf.core import BuildContext, Init, ParamSpec, Role


def layer_depth(ctx: BuildContext) -> tuple[float, float]:
    """How deep the layer lies: from 0 (first) to 1 (last), and from 1 (first) to almost 0 (last).

    A layer built alone, beyond the layers that its context counts, is the last one.
    """
    n_layers = max(ctx.n_layers, ctx.layer_idx + 1)
    return ctx.layer_idx / max(n_layers - 1, 1), 1.0 - ctx.layer_idx / n_layers


def channel_pattern(make: Callable[[Tensor], Tensor], role: Role = "state") -> ParamSpec:
    """A start computed from the channels' numbers 0, 1, ... (float32), the same for every seed."""

    def fill(tensor: Tensor, generator: Generator) -> None:
        tensor.copy_(make(torch.arange(tensor.numel(), dtype=torch.float32)).reshape(tensor.shape))

    return ParamSpec(role, fill, drawn=False)


def channel_ramp(width: int, power: float, *, falling: bool = False, offset: float = 0.0) -> ParamSpec:
    """(i / width)^power + offset for channel i; ``falling``: 1 less that. The share of the token before, or of the present."""

    def make(i: Tensor) -> Tensor:
        rising = (i / width) ** power + offset
        return 1 - rising if falling else rising

    return channel_pattern(make)


def scaled_orthogonal(gain: float) -> Init:
    """An orthogonal matrix, drawn evenly from all such, times ``gain``."""

    def fill(tensor: Tensor, generator: Generator) -> None:
        torch.nn.init.orthogonal_(tensor, gain=gain, generator=generator)

    return fill
