"""Sines and cosines added to the input (https://arxiv.org/abs/1706.03762)."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from hybridtf.core import BuildContext, InputPosition, PositionConfig, Site
from hybridtf.nn.positions.angles import angles, powers


class SinusoidalPositionConfig(PositionConfig):
    """Adds ``scale`` times sin and cos of position * theta^(-2i/d_model), computed at each call and stored nowhere.

    ``layout``: channels 2i and 2i+1 are sin and cos of frequency i (``interleaved``, the paper's), or the first half holds the
    sines and the second the cosines (``halves``).
    """

    type: Literal["sinusoidal"] = "sinusoidal"
    site: ClassVar[Site] = "input"
    theta: float = Field(default=10000.0, gt=0)
    layout: Literal["interleaved", "halves"] = "interleaved"
    scale: float = Field(default=1.0, gt=0)

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> SinusoidalPosition:
        if ctx.d_model % 2:
            raise ctx.error(f"sinusoidal positions need an even width: d_model = {ctx.d_model}")
        return SinusoidalPosition(self)


class SinusoidalPosition(InputPosition):
    """See :class:`SinusoidalPositionConfig`. Angles are formed in float64."""

    def __init__(self, config: SinusoidalPositionConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = angles(positions, powers(x.shape[-1] // 2, self.config.theta, x.device))  # [b, t, d / 2]
        pair = (angle.sin(), angle.cos())
        told = torch.stack(pair, dim=-1).flatten(-2) if self.config.layout == "interleaved" else torch.cat(pair, dim=-1)
        return x + (told * self.config.scale).to(x.dtype)

    def extra_repr(self) -> str:
        return f"theta={self.config.theta}, layout={self.config.layout}, scale={self.config.scale}"
