"""Gated DeltaNet-2 (https://github.com/NVlabs/GatedDeltaNet-2): a delta rule that erases and writes by gates of their own, each
channel by itself.

    q, k, v = silu(conv(x W));  q, k of length 1;  b = sigmoid(b_proj(x));  w = sigmoid(w_proj(x))
    log_a = -exp(A_log) softplus(decay_proj(x) + dt_bias)
    S_t = (I - k_t (b_t * k_t)^T) Diag(exp(log_a_t)) S_{t-1} + k_t (w_t * v_t)^T
    out = out_proj(norm(S_t^T q_t / sqrt(k)) * sigmoid(gate_proj(x)))

Axes: b batch, t time, d d_model, h value heads, g key heads, k head_dim, p value width.

No outside layer was run (it needs a GPU): the recurrence is held to fla's plain loop, and what is around it is spelled out in
the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Fixed,
    ParamSpec,
    Segments,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import (
    Bottleneck,
    GatedRMSNorm,
    MemoryConfig,
    MemoryMixer,
    ShortConvs,
    SoftplusDecayConfig,
    ValueHeadsConfig,
    l2_normalised,
    softplus_log_decay,
)


class GDN2Config(ValueHeadsConfig, SoftplusDecayConfig, MemoryConfig):
    """Gated DeltaNet-2: the delta rule with separate gates that erase keys and write values, channel by channel. With b = w =
    beta, one number a head, it is KDA."""

    source: ClassVar[str] = "https://github.com/NVlabs/GatedDeltaNet-2"

    type: Literal["gdn2"] = "gdn2"
    n_heads: int = Field(default=16, gt=0)
    """Heads of queries and keys, and of what acts on keys: decay and erase gate."""
    head_dim: int = Field(default=128, gt=0)
    v_dim: int | None = Field(default=None, gt=0)
    """Width of a value head. None: ``head_dim``."""
    d_conv: int = Field(default=4, gt=0)
    conv_bias: bool = False
    allow_neg_eigval: bool = False
    """The erase gate goes to 2 instead of 1 (https://arxiv.org/abs/2411.12537)."""
    chunk_size: int = Field(default=32, gt=0)

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, head_dim=4, v_dim=3, chunk_size=4)

    def build(self, ctx: BuildContext) -> GDN2:
        return GDN2(self, ctx)


class GDN2(MemoryMixer):
    """See :class:`GDN2Config`. Its state: the windows of three convolutions, and the matrix S (b h k p) of each head."""

    op = "dplr"

    def __init__(self, config: GDN2Config, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.v_dim = config.v_dim or config.head_dim
        keys, values = config.n_heads * config.head_dim, config.value_heads * self.v_dim
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
            ctx.child("norm", d_model=values), n_groups=config.value_heads, eps=config.eps, norm_first=True,
            activation="sigmoid", shared_weight=True,
        )
        self.out_proj = nn.Linear(values, width, bias=False, **factory)
        sizes = {"n_heads": config.value_heads, "head_dim": self.v_dim, "d_state": config.head_dim}
        self.dplr = ctx.bind_kernel("dplr", config.kernel, sizes=sizes)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {
            **self.config.decay_specs(),
            "out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True),
        }

    def memory_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"S": (self.config.value_heads, self.config.head_dim, self.v_dim)}

    def recur(
        self, x: Tensor, given: Mapping[str, Tensor], segments: Segments | None, memory: Fixed | None, **more: Any
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        config = self.config
        q, k = (l2_normalised(self._keys(given[name])) for name in ("q", "k"))
        erase = self._keys(torch.sigmoid(self.b_proj(x))) * (2 if config.allow_neg_eigval else 1)
        v = (torch.sigmoid(self.w_proj(x)) * given["v"]).unflatten(-1, (config.value_heads, -1))
        log_a = softplus_log_decay(self._keys(self.decay_proj(x)), self.A_log[:, None], self._keys(self.dt_bias))
        # What is erased is read after the decay.
        r = erase * k * log_a.exp()
        q, k, log_a, r = (z.repeat_interleave(config.value_heads // config.n_heads, dim=2) for z in (q, k, log_a, r))
        y, S = self.dplr(
            q * config.head_dim**-0.5, k, v, log_a, -k, r, initial_state=None if memory is None else memory["S"],
            segments=segments, chunk_size=config.chunk_size, n_tokens=x.shape[1],
        )
        return self.out_proj(self.norm(y.flatten(-2), self.gate_proj(x))), {"S": S}

    def _keys(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.config.n_heads, -1))
        return heads
