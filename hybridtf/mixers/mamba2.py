"""Mamba-2 (https://arxiv.org/abs/2405.21060): a state with one decay a head, fed through a short convolution; and its
log-linear form (https://arxiv.org/abs/2506.04761), which weighs the blocks of the past apart.

    x, B, C = silu(conv(in_proj(u)));  dt = softplus(dt + dt_bias);  a = exp(-exp(A_log) dt)
    S_t = a_t S_{t-1} + dt_t B_t x_t^T;  y_t = S_t^T C_t + D x_t;  out = out_proj(norm(y * silu(z)))

Log-linear: S_t is the sum of the states S_t^l of blocks, and y_t = sum_l softplus(L_l dl_t^l) (S_t^l)^T C_t + D x_t.

Axes: b batch, t time, d d_model, h heads, p head_dim, g groups, n d_state, c conv channels, l levels.

Mamba-2 is held to the layers of transformers. No outside layer was run for the log-linear form: the matrix by which it mixes is
fla's, and what is around it is spelled out in the tests.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Edges,
    Fixed,
    ParamSpec,
    RecurrentMixer,
    Segments,
    State,
    init,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import GatedRMSNorm, ShortConv, SoftplusDecayConfig, accumulation_dtype, head_count, idle_beside, time_step


class Mamba2Options(SoftplusDecayConfig):
    """Options of both. The inner width is ``expand * d_model``, or ``n_heads * head_dim`` where ``n_heads`` is given."""

    d_state: int = Field(default=128, gt=0)
    head_dim: int = Field(default=64, gt=0)
    expand: float = Field(default=2.0, gt=0)
    n_heads: int | None = Field(default=None, gt=0)
    n_groups: int = Field(default=1, gt=0)
    """Groups of heads that share B and C, and groups of channels of the output norm."""
    d_conv: int = Field(default=4, gt=0)
    conv_bias: bool = True
    bias: bool = False
    """Of ``in_proj`` and ``out_proj``."""
    in_scale: tuple[float, float, float, float, float] | None = Field(default=None, examples=[(1.0, 0.5, 2.0, 1.5, 0.7)])
    """Multiplies z, x, B, C and dt as ``in_proj`` gives them (Falcon-H1). None: 1."""
    dt_limit: tuple[float, float] | None = None
    """Clamps the time step. None: no clamp."""
    norm: bool = True
    """RMS norm of the output. False: its gate alone (Falcon-H1)."""
    norm_first: bool = False
    """Norm before the gate instead of after it."""
    eps: float = Field(default=1e-5, gt=0)
    chunk_size: int = Field(default=64, gt=0)
    kernel: str = "auto"
    conv_kernel: str = "auto"

    _without_norm = idle_beside({"norm": False}, "norm_first", "eps")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.dt_limit is not None and not 0 <= self.dt_limit[0] <= self.dt_limit[1]:
            raise ValueError(f"dt_limit = {list(self.dt_limit)} must be two rising numbers of 0 or more")
        if self.n_heads is not None and self.n_heads % self.n_groups:
            raise ValueError(f"n_heads = {self.n_heads} is not divisible by n_groups = {self.n_groups}")
        return self


class Mamba2Config(Mamba2Options):
    """Mamba-2: a matrix state with one decay a head, fed through a short convolution. Options: :class:`Mamba2Options`."""

    type: Literal["mamba2"] = "mamba2"
    source: ClassVar[str] = "https://arxiv.org/abs/2405.21060"

    @classmethod
    def tiny(cls) -> Self:
        return cls(d_state=5, head_dim=3, n_heads=4, n_groups=2, chunk_size=4)

    def build(self, ctx: BuildContext) -> Mamba2:
        return Mamba2(self, ctx)


class Mamba2(RecurrentMixer):
    """See :class:`Mamba2Config`. Its state: the convolution's window and the matrix S (b h n p) of each head."""

    op: ClassVar[str] = "ssd"

    def __init__(self, config: Mamba2Options, ctx: BuildContext, n_levels: int = 0) -> None:
        super().__init__()
        self.config = config
        inner = config.n_heads * config.head_dim if config.n_heads else round(config.expand * ctx.d_model)
        self.n_heads = head_count(ctx, config.head_dim, inner, "expand * d_model")
        if self.n_heads % config.n_groups:
            raise ctx.error(f"{self.n_heads} heads are not divisible by n_groups = {config.n_groups}")
        self.d_inner, self.d_bc = inner, config.n_groups * config.d_state
        widths = {"z": inner, "x": inner, "b": self.d_bc, "c": self.d_bc, "dt": self.n_heads}
        if n_levels:
            widths["dl"] = self.n_heads * n_levels
        self.splits = {"in_proj": widths}
        self.in_proj = nn.Linear(ctx.d_model, sum(widths.values()), bias=config.bias, **ctx.factory)
        self.conv = ShortConv(
            ctx.child("conv", d_model=inner + 2 * self.d_bc), config.d_conv, bias=config.conv_bias, activation="silu",
            kernel=config.conv_kernel,
        )
        self.A_log = nn.Parameter(torch.empty(self.n_heads, **ctx.factory))
        self.dt_bias = nn.Parameter(torch.empty(self.n_heads, **ctx.factory))
        self.D = nn.Parameter(torch.empty(self.n_heads, **ctx.factory))
        self.norm = GatedRMSNorm(
            ctx.child("norm", d_model=inner), n_groups=config.n_groups, eps=config.eps, norm_first=config.norm_first
        ) if config.norm else None
        self.out_proj = nn.Linear(inner, ctx.d_model, bias=config.bias, **ctx.factory)
        sizes = {"n_heads": self.n_heads, "head_dim": config.head_dim, "d_state": config.d_state, "n_groups": config.n_groups}
        if n_levels:
            sizes["n_levels"] = n_levels
        self.ssd = ctx.bind_kernel(self.op, config.kernel, sizes=sizes)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {
            **self.config.decay_specs(),
            "D": ParamSpec("state", init.constant(1.0)),
            "out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True),
        }

    def state_shape(self) -> tuple[int, ...]:
        """The shape of one row's S."""
        return self.n_heads, self.config.d_state, self.config.head_dim

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        dtype = accumulation_dtype(self.ssd.dtype)
        return {
            "conv": self.conv.init_state(batch_size),
            "ssm": Fixed.empty(batch_size, {"S": self.state_shape()}, dtype=dtype, device=self.ssd.device),
        }

    def mix(
        self, u: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Tensor, State | None]:
        config, more = self.config, sum(self.splits["in_proj"].values()) - 2 * self.d_inner - 2 * self.d_bc - self.n_heads
        widths = [self.d_inner, self.d_inner + 2 * self.d_bc, self.n_heads, more]
        z, xbc, dt, dl = self._scaled(self.in_proj(u)).split(widths, dim=-1)
        xbc, conv = self.conv(xbc, segments, None if state is None else state["conv"])
        x, b, c = xbc.split([self.d_inner, self.d_bc, self.d_bc], dim=-1)
        x = x.unflatten(-1, (self.n_heads, config.head_dim))  # [b, t, h, p]
        b, c = (y.unflatten(-1, (config.n_groups, config.d_state)) for y in (b, c))  # [b, t, g, n]
        wide = accumulation_dtype(u.dtype)
        dt = time_step(dt, self.dt_bias)
        if config.dt_limit is not None:
            dt = dt.clamp(*config.dt_limit)
        log_a = -self.A_log.to(wide).exp() * dt  # [b, t, h]
        ssm = None if state is None else state["ssm"]
        y, S = self.recur(c, b, (x * dt[..., None]).to(x.dtype), log_a, dl.to(wide), segments, ssm)
        y = y + self.D.to(y.dtype)[:, None] * x
        y = y.flatten(-2)
        out = self.out_proj((y * F.silu(z.to(y.dtype))).to(z.dtype) if self.norm is None else self.norm(y, z))
        if ssm is None:
            return out, None
        return out, {"conv": conv, "ssm": ssm.advance({"S": S}, segments, u.shape[1])}

    def _scaled(self, y: Tensor) -> Tensor:
        """What ``in_proj`` gave, times ``in_scale``."""
        if self.config.in_scale is None:
            return y
        widths = [self.d_inner, self.d_inner, self.d_bc, self.d_bc, self.n_heads]
        scales = [y.new_full((width,), scale) for scale, width in zip(self.config.in_scale, widths, strict=True)]
        return y * torch.cat([*scales, y.new_ones(y.shape[-1] - sum(widths))])

    def recur(
        self, c: Tensor, b: Tensor, x: Tensor, log_a: Tensor, dl: Tensor, segments: Segments | None, state: Fixed | None
    ) -> tuple[Tensor, Tensor]:
        """Read-outs (b t h p) and the S after the call; ``dl`` (b t h*l) is of no width without levels."""
        y, S = self.ssd(
            c, b, x, log_a, initial_state=None if state is None else state["S"], segments=segments,
            chunk_size=self.config.chunk_size, n_tokens=x.shape[1],
        )
        return y, S


class LogLinearConfig(Mamba2Options):
    """Log-linear Mamba-2: log2(T) matrix states a head for T tokens, which each token reads with weights of its own. They are
    of the last token, the 1 or 2 before it, and so on in a Fenwick tree."""

    type: Literal["log_linear"] = "log_linear"
    source: ClassVar[str] = "https://arxiv.org/abs/2506.04761"
    n_levels: int = Field(default=15, gt=0, le=24)
    """Blocks, the token's own included: as many as 2^(n_levels - 1) tokens need. In longer documents the last block holds all
    that is older."""

    @model_validator(mode="after")
    def _blocks(self) -> Self:
        if self.n_levels < 2:
            raise ValueError(f"n_levels = {self.n_levels} must be at least 2: the token itself, and what is before it")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(d_state=3, head_dim=3, n_heads=4, n_groups=2, n_levels=4, chunk_size=4)

    def build(self, ctx: BuildContext) -> LogLinearMamba2:
        return LogLinearMamba2(self, ctx)


class LogLinearMamba2(Mamba2):
    """See :class:`LogLinearConfig`. Its state: the convolution's window and the matrices S (b l-1 h n p) of each head."""

    op: ClassVar[str] = "log_linear"

    def __init__(self, config: LogLinearConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx, config.n_levels)
        self.n_levels = config.n_levels
        self.L = nn.Parameter(torch.empty(self.n_heads, config.n_levels, **ctx.factory))

    def param_specs(self) -> dict[str, ParamSpec]:
        return {**super().param_specs(), "L": ParamSpec("state", init.constant(1.0))}

    def state_shape(self) -> tuple[int, ...]:
        return self.n_levels - 1, *super().state_shape()

    def recur(
        self, c: Tensor, b: Tensor, x: Tensor, log_a: Tensor, dl: Tensor, segments: Segments | None, state: Fixed | None
    ) -> tuple[Tensor, Tensor]:
        scales = F.softplus(self.L.to(dl.dtype) * dl.unflatten(-1, (self.n_heads, self.n_levels)))
        y, (S, _) = self.ssd(
            c, b, x, log_a, scales, initial_state=None if state is None else (state["S"], state.length), segments=segments,
            chunk_size=self.config.chunk_size, n_tokens=x.shape[1],
        )
        return y, S
