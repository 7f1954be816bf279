"""LAuReL, a learned augmented residual (https://arxiv.org/abs/2411.07501), in its low-rank form: an option of wirings.

    f(n) + n + norm(up(down(n)))      takes the place of f(n), where n is what the branch f reads

Axes: b batch, t time, d d_model, r rank.

Held to transformers' Gemma 3n (tests/interop/test_oracles.py).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from hybridtf.blocks.options import WiringConfig
from hybridtf.core import BuildContext, Component, ConfigTable, NormConfig


class LaurelOptions(ConfigTable):
    """What is added to a branch beside what it gives."""

    rank: int = Field(gt=0)
    norm: Component[NormConfig] | None = Field(default=None, examples=[{"type": "rms_norm"}])
    """Of the low-rank part (Gemma 3n). None: as it is."""
    on: Literal["mixer", "channel_mixer", "both"] = "mixer"
    """The branches that have one."""


class AugmentedConfig(WiringConfig):
    """Wirings whose branches may have one."""

    laurel: LaurelOptions | None = Field(default=None, examples=[{"rank": 3}])
    """A learned residual of each branch, of low rank, beside the plain one (Gemma 3n)."""


class Laurel(nn.Module):
    """n + norm(up(down(n)))."""

    def __init__(self, options: LaurelOptions, ctx: BuildContext) -> None:
        super().__init__()
        self.down = nn.Linear(ctx.d_model, options.rank, bias=False, **ctx.factory)
        self.up = nn.Linear(options.rank, ctx.d_model, bias=False, **ctx.factory)
        self.norm = None if options.norm is None else options.norm.build(ctx.child("norm"))

    def forward(self, n: Tensor) -> Tensor:
        """(b t d) to (b t d)."""
        y: Tensor = self.up(self.down(n))
        return n + (y if self.norm is None else self.norm(y))
