"""Rotary positions (https://arxiv.org/abs/2104.09864)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field
from torch import Tensor

from hybridtf.core import BuildContext, OneOf, PositionConfig, QueryKeyPosition, Site
from hybridtf.nn.norms import accumulation_dtype
from hybridtf.nn.positions.angles import angles, exponents, powers
from hybridtf.nn.positions.scaling import SCALINGS, RopeScaling


class RopeConfig(PositionConfig):
    """Rotary positions on queries and keys.

    ``fraction`` of each head is rotated, the rest passes. ``interleaved`` pairs neighbours (2i, 2i+1) as in the paper;
    otherwise the pairs are (i, i + width/2), as in GPT-NeoX and Llama. ``scaling`` stretches them beyond a trained length: a
    table with its type, one of ``linear``, ``proportional``, ``ntk``, ``dynamic_ntk``, ``yarn``, ``llama3``, ``longrope``.
    """

    type: Literal["rope"] = "rope"
    site: ClassVar[Site] = "qk"
    theta: float = Field(default=10000.0, gt=0)
    fraction: float = Field(default=1.0, gt=0, le=1)
    interleaved: bool = False
    scaling: Annotated[RopeScaling, OneOf("scaling", *SCALINGS)] | None = Field(
        default=None, examples=[{"type": "linear", "factor": 4.0}]
    )

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext) -> Rope:
        width = int(ctx.d_model * self.fraction)
        if width < 2 or width % 2:
            raise ctx.error(
                f"rope rotates pairs: head_dim {ctx.d_model} x fraction {self.fraction} = {width} must be even and at least 2"
            )
        fault = None if self.scaling is None else self.scaling.fault(width, self.theta)
        if fault is not None:
            raise ctx.child("scaling").error(fault)
        return Rope(width, self.theta, self.interleaved, self.scaling, ctx.max_seq_len)


class Rotation(NamedTuple):
    """What turns pairs, which lie along an axis of two: the second last, or the last where neighbours are pairs."""

    cos: Tensor
    """(b t 1 1 half) or (b t 1 half 1): of each pair's angle, times the attention factor."""
    sin: Tensor
    """(b t 1 2 half) or (b t 1 half 2): the same, negative for the first of a pair."""


class Rope(QueryKeyPosition):
    """Rotates pair i of the first ``width`` channels by position * frequency_i, theta^(-2i/width) where nothing scales.

    Angles are formed in float64 at each call and nothing is stored, so casting or moving a model cannot spoil them.
    """

    def __init__(
        self, width: int, theta: float, interleaved: bool, scaling: RopeScaling | None = None, max_seq_len: int = 2048
    ) -> None:
        super().__init__()
        self.width, self.theta, self.interleaved = width, theta, interleaved
        self.pair_axis = -1 if interleaved else -2
        """Where the two of a pair lie, of (... 2 half) or (... half 2)."""
        self.scaling, self.max_seq_len = scaling, max_seq_len
        self.scaling_key = repr(scaling)
        self.factor = 1.0 if scaling is None else scaling.magnitude(max_seq_len)
        follows = "nothing" if scaling is None else scaling.follows
        self.uses_max_len, self.uses_lengths = follows == "declared", follows == "running"
        if self.uses_lengths:
            why = "mode 'running' rotates by the length so far, and held keys stay as they are; mode 'declared' fixes it"
            self.cannot = {"cut": why, "crop": why}

    def frequencies(self, device: torch.device, length: Tensor | int | None = None) -> Tensor:
        """(half), or (b t half) for lengths (b t): the angle per token of each pair. ``length``: None for ``max_seq_len``."""
        half = self.width // 2
        if self.scaling is None:
            return powers(half, self.theta, device)
        return self.scaling.frequencies(exponents(half, device), self.theta, self.max_seq_len if length is None else length)

    def table(
        self, positions: Tensor, dtype: torch.dtype, *, max_len: int | None = None, lengths: Tensor | None = None
    ) -> Rotation:
        length: Tensor | int | None = max_len
        if self.uses_lengths:
            whole = positions.amax(1, keepdim=True) + 1 if positions.shape[1] else positions
            length = whole if lengths is None else lengths
        angle = angles(positions, self.frequencies(positions.device, length))[..., None, :]
        dtype = accumulation_dtype(dtype)
        cos, sin = angle.cos(), angle.sin()
        if self.factor != 1.0:
            cos, sin = cos * self.factor, sin * self.factor
        cos, sin = cos.to(dtype), sin.to(dtype)
        return Rotation(cos.unsqueeze(self.pair_axis), torch.stack([-sin, sin], dim=self.pair_axis))

    def forward(self, x: Tensor, table: Rotation) -> Tensor:
        cos, sin = table
        whole = x.shape[-1] == self.width
        rotated = x if whole else x[..., : self.width]
        rotated = rotated if x.dtype == cos.dtype else rotated.to(cos.dtype)
        half = self.width // 2
        pairs = rotated.view(*rotated.shape[:-1], *((half, 2) if self.interleaved else (2, half)))
        # (a, b) cos + (b, a) (-sin, sin)
        out = torch.addcmul(pairs * cos, pairs.flip(self.pair_axis), sin).flatten(-2)
        out = out if x.dtype == out.dtype else out.to(x.dtype)
        return out if whole else torch.cat([out, x[..., self.width :]], dim=-1)

    def table_key(self) -> Hashable:
        # A subclass may make another table of the same options.
        if self.uses_lengths or type(self) is not Rope:
            return None
        return ("rope", self.width, self.theta, self.interleaved, self.max_seq_len, self.scaling_key)

    def extra_repr(self) -> str:
        scaling = "" if self.scaling is None else f", scaling={self.scaling.to_dict()}"
        return f"width={self.width}, theta={self.theta}, interleaved={self.interleaved}{scaling}"
