"""Gated linear units as channel mixers (https://arxiv.org/abs/2002.05202): ``glu`` and its presets."""

from __future__ import annotations

from statistics import NormalDist
from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    ChannelMixer,
    ChannelMixerConfig,
    Component,
    NormConfig,
    ParamSpec,
    Preset,
    Segments,
    State,
    check_call,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import FactorConfig, GateOptions, accumulation_dtype


class GLUConfig(ChannelMixerConfig, GateOptions):
    """y = down(act(gate(x)) * up(x)), with gate and up bounded and up shifted where its options say so."""

    type: Literal["glu"] = "glu"
    d_ff: int = Field(gt=0)
    bias: bool = False
    gate_factor: FactorConfig | None = Field(default=None, examples=[{"start": 1.5}])
    """Multiplies each channel of gate (nGPT)."""
    up_factor: FactorConfig | None = Field(default=None, examples=[{"start": 1.5}])
    inner_norm: Component[NormConfig] | None = Field(default=None, examples=[{"type": "rms_norm"}])
    """Of what goes into ``down`` (Dory)."""
    gate_sparsity: float = Field(default=0.0, ge=0, lt=1)
    """Gates of each token below mean + z(share) deviations are 0, and those above start there: about this share is 0, as of
    normal numbers (Gemma 3n). 0: all stay."""

    @classmethod
    def tiny(cls) -> Self:
        return cls(d_ff=12)

    def build(self, ctx: BuildContext) -> GLU:
        return GLU(self, ctx)


class GLU(ChannelMixer):
    """See :class:`GLUConfig`."""

    def __init__(self, config: GLUConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.gate_proj = nn.Linear(ctx.d_model, config.d_ff, bias=config.bias, **ctx.factory)
        self.up_proj = nn.Linear(ctx.d_model, config.d_ff, bias=config.bias, **ctx.factory)
        self.down_proj = nn.Linear(config.d_ff, ctx.d_model, bias=config.bias, **ctx.factory)
        self.gate_factor = None if config.gate_factor is None else config.gate_factor.build(ctx, config.d_ff)
        self.up_factor = None if config.up_factor is None else config.up_factor.build(ctx, config.d_ff)
        inner = ctx.child("inner_norm", d_model=config.d_ff)
        self.inner_norm = None if config.inner_norm is None else config.inner_norm.build(inner)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"down_proj.weight": ParamSpec("matrix", fan_in(self.down_proj.weight), residual=True)}

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, keep: int = 0
    ) -> tuple[Tensor, State | None]:
        check_call(self, x, segments, state)
        gate, up = self.gate_proj(x), self.up_proj(x)
        gate = sparse(gate, self.config.gate_sparsity) if self.config.gate_sparsity else gate
        gate = gate if self.gate_factor is None else self.gate_factor(gate)
        hidden = self.config.gate_with(gate, up if self.up_factor is None else self.up_factor(up))
        return self.down_proj(hidden if self.inner_norm is None else self.inner_norm(hidden)), state


def sparse(gate: Tensor, share: float) -> Tensor:
    """relu(gate - (mean + z std)) over the channels of each token (b t f), z the normal quantile of ``share``."""
    wide = gate.to(accumulation_dtype(gate.dtype))
    centred = wide - wide.mean(-1, keepdim=True)
    # The root of 0 has no gradient, and a pad's gates are 0.
    std = (centred.square().mean(-1, keepdim=True) + torch.finfo(wide.dtype).tiny).sqrt()
    return F.relu(centred - NormalDist().inv_cdf(share) * std).to(gate.dtype)


# ``geglu_tanh`` is Gemma's, ``clamped_swiglu`` gpt-oss's.
PRESETS = (
    Preset("swiglu", "glu", {"activation": "silu"}),
    Preset("geglu", "glu", {"activation": "gelu"}),
    Preset("geglu_tanh", "glu", {"activation": "gelu_tanh"}),
    Preset("reglu", "glu", {"activation": "relu"}),
    Preset("clamped_swiglu", "glu", {"activation": "quick_gelu", "limit": 7.0, "up_shift": 1.0}),
)
