"""A norm that is none."""

from __future__ import annotations

from typing import Literal, Self

import torch
from torch import Tensor, nn

from hybridtf.core import BuildContext, Norm, NormConfig, ParamSpec, init


class BatchNormConfig(NormConfig):
    """Normalises over the tokens: no norm in the sense of the contract."""

    type: Literal["broken_norm"] = "broken_norm"

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> Norm:
        return BatchNorm(ctx)


class BatchNorm(Norm):
    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ctx.d_model, **ctx.factory))

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"weight": ParamSpec("norm", init.constant(1.0))}

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) * self.weight
