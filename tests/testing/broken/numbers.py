"""Mixers whose numbers are fine, until they are not."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtf.core import BuildContext, Segments, State
from hybridtf.testing.doubles import EmaConfig, EmaMixer


class ZeroHasNoLength(EmaMixer):
    """Divides by the length of a token: a token of zeros has a gradient of NaN, though its result is guarded."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        size = x.square().sum(-1, keepdim=True).sqrt()
        return super()._step(torch.where(size > 0, x / size.clamp(min=1e-6), torch.zeros_like(x)), segments, state)


class GrowsWithLength(EmaMixer):
    """Takes its decay out of the sum, whose exponential overflows when it is long."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super()._step(x, segments, state)
        place = torch.arange(x.shape[1], dtype=y.dtype)
        return y * torch.exp(place)[:, None] * torch.exp(-place)[:, None], new


class RedrawsFeatures(EmaMixer):
    """Random features, drawn anew in each call."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        return super()._step(x * (1 + 0.01 * torch.rand(x.shape[-1], dtype=x.dtype)), segments, state)


class FeaturesLost(EmaMixer):
    """Random features that no checkpoint holds."""

    def __init__(self, config: EmaConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.features = 1 + 0.1 * torch.rand(ctx.d_model)

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        return super()._step(x * self.features.to(x.dtype), segments, state)


class MixesDtypes(EmaMixer):
    """Multiplies its state, which is wide, with a weight that is not."""

    def _step(self, x: Tensor, segments: Segments | None, state: State) -> tuple[Tensor, State]:
        y, new = super()._step(x, segments, state)
        return y + 0 * (new["h"][:, None] @ self.out_proj.weight.T).to(y.dtype), new


BROKEN: dict[str, tuple[str, str]] = {
    "ZeroHasNoLength": ("finite", "tokens of zeros: gradient of input 0: not finite"),
    "GrowsWithLength": ("finite", "a long call (300 tokens): the result: not finite"),
    "RedrawsFeatures": ("eval", "differ"),
    "FeaturesLost": ("save_load", "after save and load"),
    "MixesDtypes": ("bf16", "same dtype"),
}
