"""``interpolated``: the stream moves towards what a branch gives, each channel at a rate of its own (nGPT,
https://arxiv.org/abs/2410.01131, eqs. 10 and 11; here as Dory has it, whose transformers code defines it).

    n = norm(x);   x <- n + |r| (post(f(n)) - n)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from hybridtf.blocks.options import BRANCHES, NormsAfter, NormsBefore
from hybridtf.blocks.sequential import Sequential
from hybridtf.blocks.wiring import BranchResult
from hybridtf.core import BuildContext, Component, NormConfig, ParamSpec
from hybridtf.core.init import declared_specs
from hybridtf.nn import Factor, FactorConfig, L2NormConfig


class InterpolatedConfig(NormsBefore, NormsAfter):
    """A step from the normed stream towards the normed output of a branch. With ``l2_norm``, the default, both lie on the unit
    sphere."""

    type: Literal["interpolated"] = "interpolated"
    norm: Component[NormConfig] = Field(default_factory=L2NormConfig)
    rate: FactorConfig = FactorConfig(start=0.05)
    """How far the step goes, 1: all the way."""

    def build(self, ctx: BuildContext) -> Interpolated:
        return Interpolated(self, ctx)


class Interpolated(Sequential):
    """See :class:`InterpolatedConfig`. The rates are ``mixer_rate`` and ``channel_rate``."""

    def __init__(self, config: InterpolatedConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        for branch in self.parts():
            self.add_module(f"{BRANCHES[branch]}_rate", config.rate.build(ctx, ctx.d_model))

    def param_specs(self) -> dict[str, ParamSpec]:
        """No scale of a branch would last: its output is normed."""
        specs = super().param_specs()
        for branch, part in self.branches().items():
            said = declared_specs(part)
            specs |= {f"{branch}.{name}": replace(s, residual=False) for name, s in said.items() if s.residual}
        return specs

    def branched(self, branch: str, x: Tensor, seen: BranchResult, call: dict[str, Any]) -> Tensor:
        x = self.norm(branch, x)
        y = self.post_norm(branch, self.branch(branch, x, seen, **call))
        rate: Factor = getattr(self, f"{BRANCHES[branch]}_rate")
        return self.onto(branch, x, self.scaled(branch, rate.value(x.dtype).abs() * (y - x)))
