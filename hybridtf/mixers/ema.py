"""Mega's multi-dimensional damped exponential moving average (https://arxiv.org/abs/2209.10655, section 3.1) with a gate.

    p, q = sigmoid(delta), 1 - sigmoid(delta) sigmoid(alpha)
    h_t = q h_{t-1} + p beta x_t      (n numbers for each channel);   ema_t = sum_n gamma h_t / sqrt(n)
    m = silu(ema + omega x);   y = out_proj(silu(gate_proj(m)) * m)

It is what Mega computes before its attention (m, called X' there; omega as in the published code), then Mega's reset gate, silu
of a projection of m, on m itself where Mega has the attention's result. The attention is left out.

Axes: b batch, t time, d d_model (channels), n d_state.

m is held to ESPnet's module, made after Mega's own; what follows is spelled out in the test. (mega-pytorch keeps
(1 - p) sigmoid(alpha) of h, which is not the paper's q.)
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Generator, Tensor, nn

from hybridtf.core import BuildContext, Edges, Fixed, ParamSpec, RecurrentMixer, Segments, SequenceMixerConfig, State, init
from hybridtf.core.init import fan_in
from hybridtf.nn import PowerOfTwo, accumulation_dtype


class EMAConfig(SequenceMixerConfig):
    """The damped moving average of Mega, gated."""

    source: ClassVar[str] = "https://arxiv.org/abs/2209.10655"

    type: Literal["ema"] = "ema"
    d_state: int = Field(default=16, gt=0)
    """Averages for each channel (h in the paper)."""
    bias: bool = True
    """Of the gate's projection."""
    chunk_size: PowerOfTwo = 64
    kernel: str = "auto"

    @classmethod
    def tiny(cls) -> Self:
        return cls(d_state=3, chunk_size=4)

    def build(self, ctx: BuildContext) -> EMA:
        return EMA(self, ctx)


class EMA(RecurrentMixer):
    """See :class:`EMAConfig`. Its state: h (b d n), float32 at least."""

    def __init__(self, config: EMAConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config, self.shape = config, (ctx.d_model, config.d_state)
        self.delta, self.alpha, self.beta, self.gamma = (
            nn.Parameter(torch.empty(self.shape, **ctx.factory)) for _ in range(4)
        )
        self.omega = nn.Parameter(torch.empty(ctx.d_model, **ctx.factory))
        self.gate_proj = nn.Linear(ctx.d_model, ctx.d_model, bias=config.bias, **ctx.factory)
        self.out_proj = nn.Linear(ctx.d_model, ctx.d_model, bias=False, **ctx.factory)
        sizes = {"channels": ctx.d_model, "d_state": config.d_state}
        self.state_space = ctx.bind_kernel("state_space", config.kernel, sizes=sizes)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {
            "delta": ParamSpec("state", init.normal(0.2)),
            "alpha": ParamSpec("state", init.normal(0.2)),
            "beta": ParamSpec("state", _alternating),
            "gamma": ParamSpec("state", init.normal(1.0)),
            "omega": ParamSpec("state", init.normal(1.0)),
            "out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True),
        }

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        dtype, device = accumulation_dtype(self.state_space.dtype), self.state_space.device
        return Fixed.empty(batch_size, {"h": self.shape}, dtype=dtype, device=device)

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Tensor, State | None]:
        wide = accumulation_dtype(x.dtype)
        delta, alpha, beta, gamma, omega = (p.to(wide) for p in (self.delta, self.alpha, self.beta, self.gamma, self.omega))
        p = torch.sigmoid(delta)
        forgotten = (p * torch.sigmoid(alpha)).clamp(max=1 - torch.finfo(wide).eps)  # all of it has no logarithm
        y, h = self.state_space(
            x.to(wide), b=p * beta, c=gamma * self.config.d_state**-0.5, log_a=torch.log1p(-forgotten),
            initial_state=None if state is None else state["h"], segments=segments, chunk_size=self.config.chunk_size,
            n_tokens=x.shape[1],
        )
        m = F.silu(y + omega * x.to(wide)).to(x.dtype)
        out = self.out_proj(F.silu(self.gate_proj(m)) * m)
        return out, None if state is None else state.advance({"h": h}, segments, x.shape[1])


def _alternating(tensor: Tensor, generator: Generator) -> None:
    """1, -1, 1, -1, ... with a little noise: averages that start by cancelling each other."""
    tensor.normal_(0.0, 0.02, generator=generator).add_(1.0)
    tensor[..., 1::2] -= 2.0
