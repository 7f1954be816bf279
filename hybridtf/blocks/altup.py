"""Alternating updates over several residual streams (https://arxiv.org/abs/2301.13310), as Gemma 3n has them.

    altup       streams are predicted; one goes through a layer wired as ``sandwich``; all are corrected by what it became
    altup_side  x_k + post(f(scale x_a)) for all streams k but the active one, a

Axes: b batch, t time, s streams, d d_model.

Held to transformers' Gemma 3n (tests/interop/test_oracles.py).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.blocks.laurel import AugmentedConfig
from hybridtf.blocks.options import NormsAfter, NormsBefore, WiringConfig
from hybridtf.blocks.sequential import OutputNorm, Sequential
from hybridtf.blocks.wiring import BranchResult
from hybridtf.core import BuildContext, ParamSpec, init
from hybridtf.nn import AlternatingUpdates


class AlternatingConfig(WiringConfig):
    """Which of how many streams a block works on."""

    n_streams: int = Field(default=4, gt=1)
    active: int = Field(default=0, ge=0)
    """The stream that is computed."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if self.active >= self.n_streams:
            raise ValueError(f"active = {self.active}, and there are n_streams = {self.n_streams}, counted from 0")
        return self


class AltUpConfig(AlternatingConfig, NormsBefore, NormsAfter, AugmentedConfig):
    """One stream goes through the layer, with norms on both sides of its branches; the others are predicted and corrected.

    ``norm`` is also the norm of what the numbers are made from.
    """

    type: Literal["altup"] = "altup"

    @classmethod
    def tiny(cls) -> Self:
        return super().tiny().model_copy(update={"n_streams": 2})

    def build(self, ctx: BuildContext) -> AltUp:
        return AltUp(self, ctx)


class AltUp(OutputNorm):
    """See :class:`AltUpConfig`. What is around the layer is ``streams``."""

    def __init__(self, config: AltUpConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.n_streams = config.n_streams
        self.streams = AlternatingUpdates(ctx.child("streams"), config.n_streams, config.active, config.norm)

    def wired(self, x: Tensor, seen: BranchResult, call: dict[str, Any]) -> Tensor:
        p = self.streams.predict(x)
        return self.streams.correct(p, super().wired(p[..., self.streams.active, :], seen, call))


class AltUpSideConfig(AlternatingConfig, NormsAfter):
    """Branches read the active stream, without a norm before, and all others take what they give."""

    type: Literal["altup_side"] = "altup_side"
    norms_before: ClassVar[bool] = False
    read_scale: bool = True
    """A learned number for each channel of what is read, 1 at the start."""

    @classmethod
    def tiny(cls) -> Self:
        return super().tiny().model_copy(update={"n_streams": 2})

    def build(self, ctx: BuildContext) -> AltUpSide:
        return AltUpSide(self, ctx)


class AltUpSide(Sequential):
    """See :class:`AltUpSideConfig`."""

    norms_output = True

    def __init__(self, config: AltUpSideConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.n_streams, self.active = config.n_streams, config.active
        self.read_scale = nn.Parameter(torch.empty(ctx.d_model, **ctx.factory)) if config.read_scale else None

    def param_specs(self) -> dict[str, ParamSpec]:
        specs = super().param_specs()
        return specs if self.read_scale is None else {**specs, "read_scale": ParamSpec("norm", init.constant(1.0))}

    def branched(self, branch: str, x: Tensor, seen: BranchResult, call: dict[str, Any]) -> Tensor:
        read = x[..., self.active, :]
        read = read if self.read_scale is None else read * self.read_scale.to(read.dtype)
        y = self.scaled(branch, self.post_norm(branch, self.branch(branch, read, seen, **call)))
        others = torch.arange(self.n_streams, device=x.device) != self.active
        return self.onto(branch, x, y.to(x.dtype)[..., None, :] * others[:, None])
