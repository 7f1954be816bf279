"""Mamba (https://arxiv.org/abs/2312.00752), the selective scan S6: a decay for every channel and state.

    x, z = in_proj(u);  x = silu(conv(x));  dt, B, C = x_proj(x);  dt = softplus(dt_proj(dt) + dt_bias)
    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t;  y_t = C_t . h_t + D x_t;  out = out_proj(y * silu(z));  A = -exp(A_log)

Axes: b batch, t time, d d_model, c inner channels, n d_state.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Generator, Tensor, nn

from hybridtf.core import (
    BuildContext,
    Edges,
    Fixed,
    ParamSpec,
    RecurrentMixer,
    Segments,
    SequenceMixerConfig,
    State,
    init,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import PositiveRange, RMSNorm, ShortConv, accumulation_dtype, idle_beside


class MambaConfig(SequenceMixerConfig):
    """Mamba: a selective state-space model a channel, whose steps, inputs and outputs the token gives. The inner width is
    ``expand * d_model``, or ``d_inner`` where that is given."""

    type: Literal["mamba"] = "mamba"
    source: ClassVar[str] = "https://arxiv.org/abs/2312.00752"
    d_state: int = Field(default=16, gt=0)
    expand: float = Field(default=2.0, gt=0)
    d_inner: int | None = Field(default=None, gt=0)
    dt_rank: Literal["auto"] | Annotated[int, Field(gt=0)] = Field(default="auto", examples=[2])
    """The width that time steps pass through. ``auto``: d_model / 16, rounded up."""
    d_conv: int = Field(default=4, gt=0)
    conv_bias: bool = True
    bias: bool = False
    """Of ``in_proj`` and ``out_proj``."""
    ssm_norm: Literal["none", "rms", "weightless"] = "none"
    """An RMS norm on dt (before ``dt_proj``), B and C: with weights as in Jamba, or without as in FalconMamba."""
    eps: float = Field(default=1e-6, gt=0)
    """Of these norms."""
    dt_range: PositiveRange = (0.001, 0.1)
    """The time steps start log-evenly in this range."""
    dt_floor: float = Field(default=1e-4, gt=0)
    dt_init: Literal["random", "constant"] = "random"
    """The start of ``dt_proj``: even in +-dt_scale / sqrt(dt_rank), or that number everywhere."""
    dt_scale: float = Field(default=1.0, gt=0)
    chunk_size: int = Field(default=64, gt=0)
    kernel: str = "auto"
    conv_kernel: str = "auto"

    _without_norm = idle_beside({"ssm_norm": "none"}, "eps")

    @classmethod
    def tiny(cls) -> Self:
        return cls(d_state=5, d_inner=6, dt_rank=3, chunk_size=4)

    def build(self, ctx: BuildContext) -> Mamba:
        return Mamba(self, ctx)


class Mamba(RecurrentMixer):
    """See :class:`MambaConfig`. Its state: the convolution's window, and h (b c n).

    The bias of the time step is a parameter of its own, added in float32: in the projection it would be rounded with it.
    """

    def __init__(self, config: MambaConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.d_inner = inner = config.d_inner or round(config.expand * ctx.d_model)
        if inner < 1:
            raise ctx.error(f"expand * d_model = {config.expand * ctx.d_model} leaves no channel")
        self.dt_rank = rank = math.ceil(ctx.d_model / 16) if config.dt_rank == "auto" else config.dt_rank
        n = config.d_state
        self.splits = {"in_proj": {"x": inner, "z": inner}, "x_proj": {"dt": rank, "b": n, "c": n}}
        self.in_proj = nn.Linear(ctx.d_model, 2 * inner, bias=config.bias, **ctx.factory)
        self.conv = ShortConv(
            ctx.child("conv", d_model=inner), config.d_conv, bias=config.conv_bias, activation="silu",
            kernel=config.conv_kernel,
        )
        self.x_proj = nn.Linear(inner, rank + 2 * n, bias=False, **ctx.factory)
        self.dt_norm, self.b_norm, self.c_norm = (
            _norm(config, ctx.child(f"{name}_norm", d_model=width)) for name, width in self.splits["x_proj"].items()
        )
        self.dt_proj = nn.Linear(rank, inner, bias=False, **ctx.factory)
        self.dt_bias = nn.Parameter(torch.empty(inner, **ctx.factory))
        self.A_log = nn.Parameter(torch.empty(inner, n, **ctx.factory))
        self.D = nn.Parameter(torch.empty(inner, **ctx.factory))
        self.out_proj = nn.Linear(inner, ctx.d_model, bias=config.bias, **ctx.factory)
        self.selective_scan = ctx.bind_kernel("selective_scan", config.kernel, sizes={"channels": inner, "d_state": n})

    def param_specs(self) -> dict[str, ParamSpec]:
        config = self.config
        bound = config.dt_scale * self.dt_rank**-0.5
        of_dt = init.uniform(-bound, bound) if config.dt_init == "random" else init.constant(bound)
        return {
            "dt_proj.weight": ParamSpec("matrix", of_dt),
            "dt_bias": ParamSpec("state", init.softplus_inverse_log_uniform(*config.dt_range, config.dt_floor)),
            "A_log": ParamSpec("state", _log_of_counting, drawn=False),
            "D": ParamSpec("state", init.constant(1.0)),
            "out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True),
        }

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        scan = self.selective_scan
        shapes = {"h": (self.d_inner, self.config.d_state)}
        return {
            "conv": self.conv.init_state(batch_size),
            "ssm": Fixed.empty(batch_size, shapes, dtype=accumulation_dtype(scan.dtype), device=scan.device),
        }

    def mix(
        self, u: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Tensor, State | None]:
        x, z = self.in_proj(u).chunk(2, dim=-1)
        x, conv = self.conv(x, segments, None if state is None else state["conv"])
        dt, b, c = self._selected(x)
        wide = accumulation_dtype(u.dtype)
        y, h = self.selective_scan(
            x, dt, -self.A_log.to(wide).exp(), b, c, self.D.to(wide),
            initial_state=None if state is None else state["ssm"]["h"], segments=segments,
            chunk_size=self.config.chunk_size, n_tokens=u.shape[1],
        )
        out = self.out_proj((y.to(wide) * F.silu(z.to(wide))).to(z.dtype))
        if state is None:
            return out, None
        return out, {"conv": conv, "ssm": state["ssm"].advance({"h": h}, segments, u.shape[1])}

    def _selected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the token itself chooses: the time step (b t c) in float32 at least, B and C (b t n)."""
        dt, b, c = self.x_proj(x).split([*self.splits["x_proj"].values()], dim=-1)
        wide = accumulation_dtype(x.dtype)
        dt = F.softplus(self.dt_proj(self.dt_norm(dt)).to(wide) + self.dt_bias.to(wide))
        return dt, self.b_norm(b), self.c_norm(c)


def _log_of_counting(tensor: Tensor, generator: Generator) -> None:
    """log 1, log 2, ..., log n in every channel (the real start of S4D)."""
    tensor.copy_(torch.arange(1, tensor.shape[1] + 1).log())


def _norm(config: MambaConfig, ctx: BuildContext) -> nn.Module:
    if config.ssm_norm == "none":
        return nn.Identity()
    return RMSNorm(ctx, config.eps) if config.ssm_norm == "rms" else _UnitNorm(config.eps)


class _UnitNorm(nn.Module):
    """The RMS norm over the last axis without weights."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(accumulation_dtype(x.dtype)), x.shape[-1:], eps=self.eps).to(x.dtype)
