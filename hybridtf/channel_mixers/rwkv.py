"""RWKV's channel mixers: a squared ReLU layer that also sees the token before, and in versions 4 to 6 a gate.

    x^z_t between x_t and x_{t-1}, by a learned share a channel, for z in k, r
    y_t = sigmoid(r_proj(x^r_t)) down(relu(up(x^k_t))^2)        (RWKV-7 has no gate)

Versions 4 (https://arxiv.org/abs/2305.13048), 5 and 6 (https://arxiv.org/abs/2404.05892), 7 (https://arxiv.org/abs/2503.14456).

Axes: b batch, t time, d d_model.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import BuildContext, ChannelMixer, ChannelMixerConfig, ParamSpec, Segments, State, check_call, with_history
from hybridtf.core.init import fan_in
from hybridtf.nn import TokenShift, channel_ramp, layer_depth


class RWKVChannelConfig(ChannelMixerConfig):
    """What the versions have in common; each version is a config of its own."""

    gated: ClassVar[bool] = True
    """There is a gate, computed from a mixture of its own."""
    ratio: ClassVar[float] = 4.0
    """``d_ff`` over d_model where it is not given."""
    power: ClassVar[int] = 1
    """The shares start as channel numbers to the power of this power of the layer's height."""
    of_present: ClassVar[bool] = False
    """``mix_k`` and ``mix_r`` are shares of the present token, and not of the one before."""

    d_ff: int | None = Field(default=None, gt=0)
    """None: 4 d_model; of version 6: 3.5 d_model."""

    @classmethod
    def tiny(cls) -> Self:
        return cls(d_ff=12)

    def build(self, ctx: BuildContext) -> RWKVChannel:
        return RWKVChannel(self, ctx)


class RWKV4ChannelConfig(RWKVChannelConfig):
    """The channel mixer of RWKV-4; its shares are of the present token."""

    of_present: ClassVar[bool] = True

    type: Literal["rwkv4_channel"] = "rwkv4_channel"


class RWKV6ChannelConfig(RWKVChannelConfig):
    """The channel mixer of RWKV-5 and RWKV-6: that of RWKV-4 with shares of the token before, and narrower."""

    ratio: ClassVar[float] = 3.5

    type: Literal["rwkv6_channel"] = "rwkv6_channel"


class RWKV7ChannelConfig(RWKVChannelConfig):
    """The channel mixer of RWKV-7: without a gate."""

    gated: ClassVar[bool] = False
    power: ClassVar[int] = 4

    type: Literal["rwkv7_channel"] = "rwkv7_channel"


class RWKVChannel(ChannelMixer):
    """See :class:`RWKVChannelConfig`. Its state is the token before."""

    def __init__(self, config: RWKVChannelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.falling = layer_depth(ctx)[1]
        width = ctx.d_model
        inner = config.d_ff or round(config.ratio * width)
        self.shift = TokenShift(ctx.child("shift"))
        self.mix_k = nn.Parameter(torch.empty(width, **ctx.factory))
        self.up_proj = nn.Linear(width, inner, bias=False, **ctx.factory)
        self.down_proj = nn.Linear(inner, width, bias=False, **ctx.factory)
        self.mix_r = nn.Parameter(torch.empty(width, **ctx.factory)) if config.gated else None
        self.r_proj = nn.Linear(width, width, bias=False, **ctx.factory) if config.gated else None

    def param_specs(self) -> dict[str, ParamSpec]:
        share = channel_ramp(self.mix_k.shape[0], self.falling**self.config.power, falling=not self.config.of_present)
        specs = {"mix_k": share, "down_proj.weight": ParamSpec("matrix", fan_in(self.down_proj.weight), residual=True)}
        return specs if self.mix_r is None else {**specs, "mix_r": share}

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return self.shift.init_state(batch_size)

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, keep: int = 0
    ) -> tuple[Tensor, State | None]:
        check_call(self, x, segments, state)
        y, after = with_history(self._mix, x, segments, state, keep, self.init_state)
        return y, after

    def _mix(self, x: Tensor, segments: Segments | None, state: State | None) -> tuple[Tensor, State | None]:
        before, state = self.shift(x, segments, state)
        y = self.down_proj(F.relu(self.up_proj(self._between(x, before, self.mix_k))).square())
        if self.r_proj is not None and self.mix_r is not None:
            y = torch.sigmoid(self.r_proj(self._between(x, before, self.mix_r))) * y
        return y, state

    def _between(self, x: Tensor, before: Tensor, share: Tensor) -> Tensor:
        start, end = (before, x) if self.config.of_present else (x, before)
        return torch.lerp(start, end, share.to(x.dtype))
