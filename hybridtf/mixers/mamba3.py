"""Mamba-3 (https://arxiv.org/abs/2603.15569), one input and one output a head: Mamba-2 with an input of two terms, a state
that turns, and no convolution.

    z, x, B, C, dt, A, lambda, w = in_proj(u);  dt = softplus(dt + dt_bias);  A = -max(softplus(A), a_floor)
    a_t = exp(A_t dt_t);  theta_t = theta_{t-1} + pi tanh(w_t) dt_t  (mod 2 pi)
    k_t = turn(norm(B_t) + B_bias, theta_t);  q_t = turn(norm(C_t) + C_bias, theta_t);  l_t = sigmoid(lambda_t)
    S_t = a_t S_{t-1} + (1 - l_t) dt_t a_t k_{t-1} x_{t-1}^T + l_t dt_t k_t x_t^T;  y_t = S_t^T q_t + D x_t
    out = out_proj(y * silu(z)), or out_proj(norm(y) * silu(z))

``turn`` rotates pairs of neighbouring channels, the first ``rope_fraction`` of them: what a complex state does.

Axes: b batch, t time, d d_model, h heads, p head_dim, g groups, n d_state, r rotated pairs.

The tests hold numbers that the published step reference gave when it was run once on a CPU between the published projections
and norms. (Other people's code for a CPU is no proof: mamba3-ssm writes k_{t-1} x_{t-1}^T without its a_t, and has no pi tanh.)
"""

from __future__ import annotations

import math
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
    SequenceMixerConfig,
    State,
    init,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import GatedRMSNorm, PositiveRange, RMSNorm, accumulation_dtype
from hybridtf.ops.documents import carried_state, mask_pads, running_sum


class Mamba3Config(SequenceMixerConfig):
    """Mamba-3 with a single input and output a head (SISO): a state that turns, an input of two terms, no convolution. The
    inner width is ``expand * d_model``."""

    type: Literal["mamba3"] = "mamba3"
    source: ClassVar[str] = "https://arxiv.org/abs/2603.15569"
    d_state: int = Field(default=128, gt=1)
    head_dim: int = Field(default=64, gt=0)
    expand: float = Field(default=2.0, gt=0)
    n_groups: int = Field(default=1, gt=0)
    """Groups of heads that share B and C, up to their biases and rotations."""
    rope_fraction: float = Field(default=0.5, gt=0, le=1)
    """How much of ``d_state`` is rotated."""
    dt_range: PositiveRange = (0.001, 0.1)
    """The time steps start log-evenly in this range."""
    dt_floor: float = Field(default=1e-4, gt=0)
    a_floor: float = Field(default=1e-4, gt=0)
    """The decay rate -A is at least this."""
    output_norm: bool = False
    """A norm of each head's output before the gate."""
    eps: float = Field(default=1e-5, gt=0)
    """Of the norms."""
    bias: bool = False
    """Of ``in_proj`` and ``out_proj``."""
    chunk_size: int = Field(default=64, gt=0)
    kernel: str = "auto"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.rotated_pairs:
            raise ValueError(f"rope_fraction = {self.rope_fraction} of d_state = {self.d_state} rotates no pair of channels")
        return self

    @property
    def rotated_pairs(self) -> int:
        """Pairs of channels of B and C that are rotated."""
        return int(self.d_state * self.rope_fraction) // 2

    @classmethod
    def tiny(cls) -> Self:
        return cls(d_state=5, head_dim=3, expand=1.5, n_groups=2, chunk_size=4)

    def build(self, ctx: BuildContext) -> Mamba3:
        return Mamba3(self, ctx)


class Mamba3(RecurrentMixer):
    """See :class:`Mamba3Config`. Its state: the matrix ``S`` (b h n p) of each head, the last token's rotated ``k`` (b h n) and
    its ``v`` (b h p), which the next one writes once more, and the ``angle`` (b h r) reached.
    """

    def __init__(self, config: Mamba3Config, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        inner = round(config.expand * ctx.d_model)
        if inner % config.head_dim:
            raise ctx.error(f"expand * d_model = {inner} is not divisible by head_dim = {config.head_dim}")
        self.n_heads = heads = inner // config.head_dim
        if heads % config.n_groups:
            raise ctx.error(f"{heads} heads are not divisible by n_groups = {config.n_groups}")
        shared, n = config.n_groups * config.d_state, config.d_state
        self.widths = {
            "z": inner, "x": inner, "b": shared, "c": shared, "dt": heads, "a": heads, "trap": heads,
            "angle": config.rotated_pairs,
        }
        self.splits = {"in_proj": self.widths}
        self.in_proj = nn.Linear(ctx.d_model, sum(self.widths.values()), bias=config.bias, **ctx.factory)
        self.dt_bias, self.D = (nn.Parameter(torch.empty(heads, **ctx.factory)) for _ in range(2))
        self.B_bias, self.C_bias = (nn.Parameter(torch.empty(heads, n, **ctx.factory)) for _ in range(2))
        self.b_norm, self.c_norm = (RMSNorm(ctx.child(name, d_model=n), config.eps) for name in ("b_norm", "c_norm"))
        self.norm = None
        if config.output_norm:
            place = ctx.child("norm", d_model=inner)
            self.norm = GatedRMSNorm(place, n_groups=heads, eps=config.eps, norm_first=True)
        self.out_proj = nn.Linear(inner, ctx.d_model, bias=config.bias, **ctx.factory)
        sizes = {"n_heads": heads, "head_dim": config.head_dim, "d_state": n, "n_groups": heads}
        self.ssd = ctx.bind_kernel("ssd_trapezoid", config.kernel, sizes=sizes)

    def param_specs(self) -> dict[str, ParamSpec]:
        dt = init.softplus_inverse_log_uniform(*self.config.dt_range, self.config.dt_floor)
        return {
            "dt_bias": ParamSpec("state", dt),
            "D": ParamSpec("state", init.constant(1.0)),
            "B_bias": ParamSpec("bias", init.constant(1.0)),
            "C_bias": ParamSpec("bias", init.constant(1.0)),
            "out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True),
        }

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        h, n, p = self.n_heads, self.config.d_state, self.config.head_dim
        shapes = {"S": (h, n, p), "k": (h, n), "v": (h, p), "angle": (h, self.config.rotated_pairs)}
        dtype = accumulation_dtype(self.ssd.dtype)
        return Fixed.empty(batch_size, shapes, max_len=max_len, dtype=dtype, device=self.ssd.device)

    def mix(
        self, u: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Tensor, State | None]:
        config, wide = self.config, accumulation_dtype(u.dtype)
        z, x, b, c, *gates = self.in_proj(u).split(list(self.widths.values()), dim=-1)
        dt, a, trap, angle = (gate.to(wide) for gate in gates)
        x = x.unflatten(-1, (self.n_heads, config.head_dim))  # [b, t, h, p]
        dt = F.softplus(dt + self.dt_bias.to(wide))
        log_a = -F.softplus(a).clamp(min=config.a_floor) * dt  # [b, t, h]
        current = torch.sigmoid(trap) * dt
        turns = dt[..., None] * (math.pi * torch.tanh(angle))[:, :, None]  # [b, t, h, r]
        theta, angle = self._angles(turns, segments, state)
        q, k = (
            _turned(self._spread(norm(y.unflatten(-1, (config.n_groups, -1)))).to(wide) + bias.to(wide), theta).to(x.dtype)
            for y, norm, bias in ((c, self.c_norm, self.C_bias), (b, self.b_norm, self.B_bias))
        )
        before = None if state is None else {name: state[name] for name in ("S", "k", "v")}
        y, last = self.ssd(
            q, k, x, log_a, (dt - current) * log_a.exp(), current, initial_state=before, segments=segments,
            chunk_size=config.chunk_size, n_tokens=u.shape[1],
        )
        y = (y + self.D.to(y.dtype)[:, None] * x).flatten(-2)
        out = self.out_proj(y * F.silu(z) if self.norm is None else self.norm(y, z))
        return out, None if state is None else state.advance({**last, "angle": angle}, segments, u.shape[1])

    def _spread(self, y: Tensor) -> Tensor:
        """(b t g n) for every head of each group: (b t h n)."""
        return y.repeat_interleave(self.n_heads // self.config.n_groups, 2)

    def _angles(self, turns: Tensor, segments: Segments | None, state: State | None) -> tuple[Tensor, Tensor]:
        """The angle at each token (b t h r) and after the call (b h r), out of what each token turns by; within 2 pi."""
        wide = torch.float32 if turns.device.type == "mps" else torch.float64  # many turns, of which only a part is kept
        start = turns.new_zeros(turns.shape[0], *turns.shape[2:]) if state is None else state["angle"]
        start = carried_state(start, wide, segments)
        theta = torch.remainder(running_sum(mask_pads(turns, segments).to(wide), start, segments), 2 * math.pi)
        last = theta[:, -1] if theta.shape[1] else start
        return theta.to(turns.dtype), last.to(turns.dtype)


def _turned(y: Tensor, theta: Tensor) -> Tensor:
    """``y`` (b t h n) with its first pairs of neighbours turned by ``theta`` (b t h r)."""
    pairs, rest = y.split([2 * theta.shape[-1], y.shape[-1] - 2 * theta.shape[-1]], dim=-1)
    cos, sin = theta.cos(), theta.sin()
    one, two = pairs[..., 0::2], pairs[..., 1::2]
    return torch.cat([torch.stack([one * cos - two * sin, one * sin + two * cos], -1).flatten(-2), rest], -1)
