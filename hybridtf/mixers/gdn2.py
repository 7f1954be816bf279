"""Gated DeltaNet-2: a delta rule that erases and writes by gates of their own, each channel by itself.

    q, k, v = silu(conv(x W));  q, k of length 1;  b = sigmoid(b_proj(x));  w = sigmoid(w_proj(x))
    log_a = -exp(A_log) softplus(decay_proj(x) + dt_bias)
    S_t = (I - k_t (b_t * k_t)^T) Diag(exp(log_a_t)) S_{t-1} + k_t (w_t * v_t)^T
    out = out_proj(norm(S_t^T q_t / sqrt(k)) * sigmoid(gate_proj(x)))

Axes: b batch, t time, d d_model, h value heads, g key heads, k head_dim, p value width.

No outside layer was run (it needs a GPU): the recurrence is held to fla's plain loop, and what is around it is spelled out in
the tests.
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
    SequenceMixerConfig,
    State,
    init,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import Bottleneck, GatedRMSNorm, PositiveRange, ShortConvs, accumulation_dtype, l2_normalised


class GDN2Config(SequenceMixerConfig):
    """Gated DeltaNet-2: the delta rule with separate gates that erase keys and write values, channel by channel. With b = w =
    beta, one number a head, it is KDA."""

    source: ClassVar[str] = "https://github.com/NVlabs/GatedDeltaNet-2"

    type: Literal["gdn2"] = "gdn2"
    n_heads: int = Field(default=16, gt=0)
    """Heads of queries and keys, and of what acts on keys: decay and erase gate."""
    n_v_heads: int | None = Field(default=None, gt=0)
    """Heads of values and states, a multiple of ``n_heads``, each group with one key head. None: ``n_heads``."""
    head_dim: int = Field(default=128, gt=0)
    v_dim: int | None = Field(default=None, gt=0)
    """Width of a value head. None: ``head_dim``."""
    d_conv: int = Field(default=4, gt=0)
    conv_bias: bool = False
    allow_neg_eigval: bool = False
    """The erase gate goes to 2 instead of 1 (https://arxiv.org/abs/2411.12537)."""
    a_range: PositiveRange = (1.0, 16.0)
    """The decay rates exp(A_log) start evenly in this range."""
    dt_range: PositiveRange = (0.001, 0.1)
    """softplus(dt_bias) starts log-evenly in this range, at least 1e-4."""
    eps: float = Field(default=1e-5, gt=0)
    chunk_size: int = Field(default=32, gt=0)
    kernel: str = "auto"
    conv_kernel: str = "auto"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.n_v_heads or self.n_heads) % self.n_heads:
            raise ValueError(f"n_v_heads = {self.n_v_heads} is not a multiple of n_heads = {self.n_heads}")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, head_dim=4, v_dim=3, chunk_size=4)

    def build(self, ctx: BuildContext) -> GDN2:
        return GDN2(self, ctx)


class GDN2(RecurrentMixer):
    """See :class:`GDN2Config`. Its state: the windows of three convolutions, and the matrix S (b h k p) of each head."""

    def __init__(self, config: GDN2Config, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.v_heads = config.n_v_heads or config.n_heads
        self.v_dim = config.v_dim or config.head_dim
        keys, values = config.n_heads * config.head_dim, self.v_heads * self.v_dim
        width, factory = ctx.d_model, ctx.factory
        self.q_proj = nn.Linear(width, keys, bias=False, **factory)
        self.k_proj = nn.Linear(width, keys, bias=False, **factory)
        self.v_proj = nn.Linear(width, values, bias=False, **factory)
        self.conv = ShortConvs(
            ctx.child("conv"), {"q": keys, "k": keys, "v": values}, config.d_conv, bias=config.conv_bias,
            kernel=config.conv_kernel,
        )
        self.b_proj = nn.Linear(width, keys, bias=False, **factory)
        self.w_proj = nn.Linear(width, values, bias=False, **factory)
        self.decay_proj = Bottleneck(ctx.child("decay_proj"), self.v_dim, keys, bias=False)
        self.gate_proj = Bottleneck(ctx.child("gate_proj"), self.v_dim, values, bias=True)
        self.A_log = nn.Parameter(torch.empty(config.n_heads, **factory))
        self.dt_bias = nn.Parameter(torch.empty(keys, **factory))
        self.norm = GatedRMSNorm(
            ctx.child("norm", d_model=values), n_groups=self.v_heads, eps=config.eps, norm_first=True, activation="sigmoid",
            shared_weight=True,
        )
        self.out_proj = nn.Linear(values, width, bias=False, **factory)
        sizes = {"n_heads": self.v_heads, "head_dim": self.v_dim, "d_state": config.head_dim}
        self.dplr = ctx.bind_kernel("dplr", config.kernel, sizes=sizes)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {
            "A_log": ParamSpec("state", init.log_uniform(*self.config.a_range)),
            "dt_bias": ParamSpec("state", init.softplus_inverse_log_uniform(*self.config.dt_range, 1e-4)),
            "out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True),
        }

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        shapes = {"S": (self.v_heads, self.config.head_dim, self.v_dim)}
        dtype = accumulation_dtype(self.dplr.dtype)
        return {
            "conv": self.conv.init_state(batch_size),
            "memory": Fixed.empty(batch_size, shapes, dtype=dtype, device=self.dplr.device),
        }

    def mix(
        self, x: Tensor, segments: Segments | None, state: State | None, *, edges: Edges | None = None
    ) -> tuple[Tensor, State | None]:
        given = {"q": self.q_proj(x), "k": self.k_proj(x), "v": self.v_proj(x)}
        mixed, windows = self.conv(given, segments, None if state is None else state["conv"])
        q, k = (l2_normalised(self._keys(mixed[name])) for name in ("q", "k"))
        erase = self._keys(torch.sigmoid(self.b_proj(x))) * (2 if self.config.allow_neg_eigval else 1)
        v = (torch.sigmoid(self.w_proj(x)) * mixed["v"]).unflatten(-1, (self.v_heads, -1))
        wide = accumulation_dtype(x.dtype)
        dt = F.softplus(self.decay_proj(x).to(wide) + self.dt_bias.to(wide))
        log_a = self._keys(dt) * -self.A_log.to(wide).exp()[:, None]
        # What is erased is read after the decay.
        r = erase * k * log_a.exp()
        q, k, log_a, r = (z.repeat_interleave(self.v_heads // self.config.n_heads, dim=2) for z in (q, k, log_a, r))
        memory = None if state is None else state["memory"]
        y, S = self.dplr(
            q * self.config.head_dim**-0.5, k, v, log_a, -k, r, initial_state=None if memory is None else memory["S"],
            segments=segments, chunk_size=self.config.chunk_size, n_tokens=x.shape[1],
        )
        out = self.out_proj(self.norm(y.flatten(-2), self.gate_proj(x)))
        if memory is None:
            return out, None
        return out, {"conv": windows, "memory": memory.advance({"S": S}, segments, x.shape[1])}

    def _keys(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.config.n_heads, -1))
        return heads
