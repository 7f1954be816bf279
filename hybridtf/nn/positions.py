"""Positions: none, rotary (https://arxiv.org/abs/2104.09864) on queries and keys, learned on the input."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import BuildContext, LengthError, ParamSpec, Position, PositionConfig, init


class NoPositionConfig(PositionConfig):
    """No positions: a mixer that knows order by itself, or NoPE attention."""

    type: Literal["none"] = "none"
    site: ClassVar[Literal["any"]] = "any"

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> None:
        return None


class RopeConfig(PositionConfig):
    """Rotary positions on queries and keys.

    ``fraction`` of each head is rotated, the rest passes. ``interleaved`` pairs neighbours (2i, 2i+1) as in the paper;
    otherwise the pairs are (i, i + width/2), as in GPT-NeoX and Llama.
    """

    type: Literal["rope"] = "rope"
    site: ClassVar[Literal["qk"]] = "qk"
    theta: float = Field(default=10000.0, gt=0)
    fraction: float = Field(default=1.0, gt=0, le=1)
    interleaved: bool = False

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> Rope:
        width = int(ctx.d_model * self.fraction)
        if width < 2 or width % 2:
            raise ctx.error(
                f"rope rotates pairs: head_dim {ctx.d_model} x fraction {self.fraction} = {width} must be even and at least 2"
            )
        return Rope(width, self.theta, self.interleaved)


class Rope(Position):
    """Rotates pair i of the first ``width`` channels by position * theta^(-2i/width).

    The angles are formed in float64 (a float32 product is off by 0.06 rad at position 10^6) and nothing is stored, so
    casting or moving a model cannot spoil them.
    """

    site: ClassVar[Literal["qk"]] = "qk"

    def __init__(self, width: int, theta: float, interleaved: bool) -> None:
        super().__init__()
        self.width, self.theta, self.interleaved = width, theta, interleaved

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.width // 2
        wide = torch.float64 if x.device.type != "mps" else torch.float32
        frequency = self.theta ** (-torch.arange(half, device=x.device, dtype=wide) / half)
        angle = positions.to(wide)[..., None, None] * frequency  # [b, t, 1, half]
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        rotated, passed = x[..., : self.width].to(dtype), x[..., self.width :]
        if self.interleaved:
            a, b = rotated[..., 0::2], rotated[..., 1::2]
            out = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        else:
            a, b = rotated.chunk(2, dim=-1)
            out = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        return torch.cat([out.to(x.dtype), passed], dim=-1) if passed.shape[-1] else out.to(x.dtype)

    def extra_repr(self) -> str:
        return f"width={self.width}, theta={self.theta}, interleaved={self.interleaved}"


class LearnedPositionConfig(PositionConfig):
    """A learned vector for each of the model's ``max_seq_len`` positions, added to the input; longer documents are refused."""

    type: Literal["learned"] = "learned"
    site: ClassVar[Literal["input"]] = "input"

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> LearnedPosition:
        return LearnedPosition(ctx)


class LearnedPosition(Position):
    """x + table[position]."""

    site: ClassVar[Literal["input"]] = "input"

    def __init__(self, ctx: BuildContext) -> None:
        super().__init__()
        self.where = ctx.where
        self.table = nn.Parameter(torch.zeros(ctx.max_seq_len, ctx.d_model, **ctx.factory))

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"table": ParamSpec("embedding", init.normal(0.02))}

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        n = self.table.shape[0]
        if not torch.compiler.is_compiling() and positions.numel() and int(positions.max()) >= n:
            raise LengthError(
                f"{self.where}: a document of {int(positions.max()) + 1} tokens is longer than the learned position table "
                f"(max_seq_len = {n})"
            )
        return x + self.table[positions.clamp(max=n - 1)].to(x.dtype)
