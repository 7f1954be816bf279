"""RWKV-4 time mixing (https://arxiv.org/abs/2305.13048): a decaying mean of values with weights exp(k), gated.

    x^z_t = mu_z x_t + (1 - mu_z) x_{t-1}  for z in r, k, v;   w = -exp(time_decay)
    wkv_t = (sum_{s<t} e^((t-1-s) w + k_s) v_s + e^(u + k_t) v_t) / (the same with 1 for v)
    out = out_proj(sigmoid(r_t) wkv_t)

Axes: b batch, t time, d d_model, c channels.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Edges,
    Fixed,
    ParamSpec,
    RecurrentMixer,
    Segments,
    SequenceMixerConfig,
    State,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import TokenShift, accumulation_dtype, channel_pattern, channel_ramp, layer_depth


class RWKV4Config(SequenceMixerConfig):
    """RWKV-4: a decaying mean of values with weights exp(k), gated. Its channel mixer is ``rwkv4_channel``."""

    source: ClassVar[str] = "https://arxiv.org/abs/2305.13048"

    type: Literal["rwkv4"] = "rwkv4"
    d_inner: int | None = Field(default=None, gt=0)
    """Channels of the recurrence. None: d_model."""
    chunk_size: int = Field(default=32, gt=0)
    kernel: str = "auto"
    conv_kernel: str = "auto"

    @classmethod
    def tiny(cls) -> Self:
        return cls(d_inner=10, chunk_size=4)

    def build(self, ctx: BuildContext) -> RWKV4:
        return RWKV4(self, ctx)


class RWKV4(RecurrentMixer):
    """See :class:`RWKV4Config`. Its state: the token before, and the sums num, den and max (b c) of the op ``wkv``."""

    def __init__(self, config: RWKV4Config, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.depth = layer_depth(ctx)
        width, inner = ctx.d_model, config.d_inner or ctx.d_model
        self.shift = TokenShift(ctx.child("shift"), config.conv_kernel)
        self.mix_r, self.mix_k, self.mix_v = (nn.Parameter(torch.empty(width, **ctx.factory)) for _ in range(3))
        self.r_proj = nn.Linear(width, inner, bias=False, **ctx.factory)
        self.k_proj = nn.Linear(width, inner, bias=False, **ctx.factory)
        self.v_proj = nn.Linear(width, inner, bias=False, **ctx.factory)
        self.out_proj = nn.Linear(inner, width, bias=False, **ctx.factory)
        self.time_decay = nn.Parameter(torch.empty(inner, **ctx.factory))
        self.time_first = nn.Parameter(torch.empty(inner, **ctx.factory))
        self.wkv = ctx.bind_kernel("wkv", config.kernel, sizes={"channels": inner})

    def param_specs(self) -> dict[str, ParamSpec]:
        """Those of the paper's appendix: fast and slow channels side by side, and a share of the token before."""
        rising, falling = self.depth
        width, inner = self.r_proj.in_features, self.r_proj.out_features
        return {
            "mix_k": channel_ramp(width, falling),
            "mix_v": channel_ramp(width, falling, offset=0.3 * rising),
            "mix_r": channel_ramp(width, 0.5 * falling),
            "time_decay": channel_pattern(lambda i: -5 + 8 * (i / max(inner - 1, 1)) ** (0.7 + 1.3 * rising)),
            "time_first": channel_pattern(lambda i: math.log(0.3) + 0.5 * ((i + 1) % 3 - 1)),
            "out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True),
        }

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        shapes = dict.fromkeys(("num", "den", "max"), (self.time_decay.shape[0],))
        dtype = accumulation_dtype(self.wkv.dtype)
        return {
            "shift": self.shift.init_state(batch_size),
            "wkv": Fixed.empty(batch_size, shapes, dtype=dtype, device=self.wkv.device),
        }

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Tensor, State | None]:
        before, shift = self.shift(x, segments, None if state is None else state["shift"])
        r, k, v = (
            proj(torch.lerp(before, x, mix.to(x.dtype)))
            for proj, mix in ((self.r_proj, self.mix_r), (self.k_proj, self.mix_k), (self.v_proj, self.mix_v))
        )
        wide = accumulation_dtype(x.dtype)
        sums = None if state is None else tuple(state["wkv"][name] for name in ("num", "den", "max"))
        y, last = self.wkv(
            k, v, -self.time_decay.to(wide).exp(), self.time_first.to(wide), initial_state=sums, segments=segments,
            chunk_size=self.config.chunk_size, n_tokens=x.shape[1],
        )
        out = self.out_proj(torch.sigmoid(r) * y)
        if state is None:
            return out, None
        kept = state["wkv"].advance(dict(zip(("num", "den", "max"), last, strict=True)), segments, x.shape[1])
        return out, {"shift": shift, "wkv": kept}
