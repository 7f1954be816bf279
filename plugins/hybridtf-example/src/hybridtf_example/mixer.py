"""``gated_ema``: s_t = a s_{t-1} + (1 - a) u_t in every channel, with a learned a; the output is gated.

Axes: b batch, t time, d d_model.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import BuildContext, Edges, Fixed, ParamSpec, RecurrentMixer, Segments, SequenceMixerConfig, State, init
from hybridtf.nn import accumulation_dtype


class GatedEmaConfig(SequenceMixerConfig):
    """A gated moving average of every channel."""

    source: ClassVar[str] = "https://arxiv.org/abs/2209.10655"  # the paper or code that says what it is

    type: Literal["gated_ema"] = "gated_ema"
    half_life: float = Field(default=16.0, gt=0)
    """Tokens after which the middle channel has forgotten half, at the start of training."""

    @classmethod
    def tiny(cls) -> Self:
        return cls(half_life=2.0)

    def build(self, ctx: BuildContext) -> GatedEma:
        return GatedEma(self, ctx)


class GatedEma(RecurrentMixer):
    """See :class:`GatedEmaConfig`. Its state is the average s (b d 1 1)."""

    def __init__(self, config: GatedEmaConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config, self.d_model = config, ctx.d_model
        self.v_proj = nn.Linear(ctx.d_model, ctx.d_model, bias=False, **ctx.factory)
        self.gate_proj = nn.Linear(ctx.d_model, ctx.d_model, bias=False, **ctx.factory)
        self.out_proj = nn.Linear(ctx.d_model, ctx.d_model, bias=False, **ctx.factory)
        self.log_rate = nn.Parameter(torch.empty(ctx.d_model, **ctx.factory))  # a = exp(-exp(log_rate))
        self.ssd = ctx.bind_kernel("ssd", sizes={"n_heads": ctx.d_model, "head_dim": 1, "d_state": 1, "n_groups": 1})

    def param_specs(self) -> dict[str, ParamSpec]:
        middle = math.log(math.log(2) / self.config.half_life)
        return {"log_rate": ParamSpec("state", init.uniform(middle - 1, middle + 1))}

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        dtype, device = accumulation_dtype(self.ssd.dtype), self.ssd.device
        return Fixed.empty(batch_size, {"s": (self.d_model, 1, 1)}, dtype=dtype, device=device)

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Tensor, State | None]:
        v = self.v_proj(x)
        log_a = -self.log_rate.to(accumulation_dtype(x.dtype)).exp().expand(v.shape)
        write = (v * -torch.expm1(log_a)).to(v.dtype)[..., None]  # every channel is a head of width 1
        q, k = torch.ones_like(write[:, :, :1]), torch.ones_like(write[:, :, :1])
        before = None if state is None else state["s"]
        y, s = self.ssd(q, k, write, log_a, initial_state=before, segments=segments, n_tokens=x.shape[1])
        out = self.out_proj(y[..., 0] * F.silu(self.gate_proj(x)))
        return out, None if state is None else state.advance({"s": s}, segments, x.shape[1])
