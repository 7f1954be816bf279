"""ALiBi: attention scores fall linearly with distance (https://arxiv.org/abs/2108.12409)."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from hybridtf.core import BiasPosition, BuildContext, PositionConfig, Site
from hybridtf.nn.positions.angles import wide_dtype


class AlibiConfig(PositionConfig):
    """A score of head h loses ``slope_h * |distance|``; in a stack that is not causal it does so both ways.

    Slopes of n heads are 2^(-max_bias (h + 1) / n) where n is a power of two. Otherwise they are those of the next smaller
    power c, and then every second of those of 2 c, as in the paper's code.
    """

    type: Literal["alibi"] = "alibi"
    site: ClassVar[Site] = "bias"
    max_bias: float = Field(default=8.0, gt=0)
    """Minus the binary logarithm of the last head's slope."""
    scale: float = Field(default=1.0, gt=0)
    """Multiplies all slopes: head_dim ** -0.5 for a model that takes them off before scores are scaled (Falcon)."""

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> Alibi:
        return Alibi(self.max_bias, self.scale)


class Alibi(BiasPosition):
    """See :class:`AlibiConfig`."""

    def __init__(self, max_bias: float, scale: float = 1.0) -> None:
        super().__init__()
        self.max_bias, self.scale = max_bias, scale

    def forward(self, n_heads: int, device: torch.device) -> Tensor:
        # Made on the device, by few small steps: nothing to copy there, and nothing kept that a cast could round. In float64,
        # which scores in float32 round and scores in float64 need.
        wide = wide_dtype(device)
        power = 1 << (n_heads.bit_length() - 1)
        first = torch.arange(1, power + 1, device=device, dtype=wide)
        more = torch.arange(n_heads - power, device=device, dtype=wide) + 0.5
        slopes = 2.0 ** (torch.cat([first, more]) * (-self.max_bias / power))
        return slopes if self.scale == 1.0 else slopes * self.scale

    def extra_repr(self) -> str:
        return f"max_bias={self.max_bias}, scale={self.scale}"
