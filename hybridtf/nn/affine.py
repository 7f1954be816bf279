"""A number to add and one to multiply by, for each channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybridtf.core import BuildContext, ParamSpec, init


class ChannelAffine(nn.Module):
    """(x + bias) * scale, of ``ctx.d_model`` channels; nothing at the start."""

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(ctx.d_model, **ctx.factory))
        self.bias = nn.Parameter(torch.empty(ctx.d_model, **ctx.factory))

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"scale": ParamSpec("norm", init.constant(1.0)), "bias": ParamSpec("bias", init.constant(0.0))}

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.bias.to(x.dtype)) * self.scale.to(x.dtype)
