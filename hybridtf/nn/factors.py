"""Learned multipliers that are stored as other numbers (nGPT, https://arxiv.org/abs/2410.01131, section 2.5): one learning rate
then moves factors of any size as it moves other parameters."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import BuildContext, ConfigTable, ParamSpec, init


class FactorConfig(ConfigTable):
    """A learned multiplier of each channel, the stored number times start / stored."""

    start: float = Field(default=1.0, gt=0)
    """Its value at the start."""
    stored: float = Field(default=1.0, gt=0)
    """What is stored of it at the start."""

    def build(self, ctx: BuildContext, width: int) -> Factor:
        return Factor(self, ctx, width)


class Factor(nn.Module):
    """See :class:`FactorConfig`."""

    def __init__(self, config: FactorConfig, ctx: BuildContext, width: int) -> None:
        super().__init__()
        self.config, self.ratio = config, config.start / config.stored
        self.weight = nn.Parameter(torch.empty(width, **ctx.factory))

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"weight": ParamSpec("norm", init.constant(self.config.stored))}

    def forward(self, x: Tensor) -> Tensor:
        """(... width) times the factor."""
        return x * self.value(x.dtype)

    def value(self, dtype: torch.dtype) -> Tensor:
        """The factor of each channel."""
        return self.weight.to(dtype) * self.ratio
