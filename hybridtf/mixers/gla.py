"""Gated Linear Attention (https://arxiv.org/abs/2312.06635): each key channel of the state forgets at a rate of its own.

    a_t = sigmoid(W_2 W_1 x_t + b)^(1 / gate_normaliser);   S_t = Diag(a_t) S_{t-1} + k_t v_t^T;   y_t = S_t^T q_t k^(-1/2)
    out = out_proj(norm(y) * silu(gate_proj(x)))

The norm is over each head's channels, with one weight for all heads. ``decay_proj``, W_1 to ``decay_rank`` channels and
then W_2 with b, starts as any projection, weights of variance 1 / fan-in and b at 0: at first a_t lies around
(1/2)^(1 / gate_normaliser).

Axes: b batch, t time, d d_model, h heads, g kv heads, k key width of a head, v value width of a head.

No outside layer was run (it needs a GPU): the recurrence is held to fla's plain loop, and what is around it is spelled out in
the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import torch.nn.functional as F
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
    GroupedHeadsConfig,
    MemoryConfig,
    MemoryMixer,
    accumulation_dtype,
    head_width,
    idle_beside,
    short_convs,
)


class GLAConfig(GroupedHeadsConfig, MemoryConfig):
    """Gated Linear Attention: each key channel of the state forgets at a rate that the token gives."""

    source: ClassVar[str] = "https://arxiv.org/abs/2312.06635"

    type: Literal["gla"] = "gla"
    n_heads: int = Field(default=4, gt=0)
    expand_k: float = Field(default=0.5, gt=0)
    """Width of all heads' queries, in d_model."""
    expand_v: float = Field(default=1.0, gt=0)
    """Width of all heads' outputs, in d_model."""
    decay_rank: int = Field(default=16, gt=0)
    """Of the two matrices that make the logits of the decay."""
    gate_normaliser: float = Field(default=16.0, gt=0)
    """The root that is taken of the gate: 16 lets a state live for long."""
    output_gate: bool = True
    d_conv: int = Field(default=0, ge=0, examples=[4])
    """Taps of short convolutions (with silu) on queries, keys and values, a variant of the published code; 0: none."""

    _without_convolution = idle_beside({"d_conv": 0}, "conv_kernel")

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, decay_rank=3, chunk_size=4)

    def build(self, ctx: BuildContext) -> GLA:
        return GLA(self, ctx)


class GLA(MemoryMixer):
    """See :class:`GLAConfig`. Its state: one matrix S (b g k v) a kv head, and the windows of convolutions, if any."""

    op = "gla"

    def __init__(self, config: GLAConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        heads, states = config.n_heads, config.kv_heads
        self.key_dim = head_width(ctx, heads, expand_k=config.expand_k)
        self.v_dim = head_width(ctx, heads, expand_v=config.expand_v)
        self.q_proj = nn.Linear(ctx.d_model, heads * self.key_dim, bias=False, **ctx.factory)
        self.k_proj = nn.Linear(ctx.d_model, states * self.key_dim, bias=False, **ctx.factory)
        self.v_proj = nn.Linear(ctx.d_model, states * self.v_dim, bias=False, **ctx.factory)
        self.decay_proj = Bottleneck(ctx.child("decay_proj"), config.decay_rank, states * self.key_dim, bias=True)
        inner = heads * self.v_dim
        self.gate_proj = nn.Linear(ctx.d_model, inner, bias=False, **ctx.factory) if config.output_gate else None
        place = ctx.child("norm", d_model=inner)
        self.norm = GatedRMSNorm(place, n_groups=heads, eps=config.eps, norm_first=True, shared_weight=True)
        self.out_proj = nn.Linear(inner, ctx.d_model, bias=False, **ctx.factory)
        channels = {"q": heads * self.key_dim, "k": states * self.key_dim, "v": states * self.v_dim}
        self.conv = short_convs(ctx.child("conv"), channels, config.d_conv, kernel=config.conv_kernel)
        sizes = {"n_heads": heads, "n_groups": states, "head_dim": self.key_dim, "v_dim": self.v_dim}
        self.gla = ctx.bind_kernel("gla", config.kernel, sizes=sizes)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {"out_proj.weight": ParamSpec("matrix", fan_in(self.out_proj.weight), residual=True)}

    def memory_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"S": (self.config.kv_heads, self.key_dim, self.v_dim)}

    def recur(
        self, x: Tensor, given: Mapping[str, Tensor], segments: Segments | None, memory: Fixed | None, **more: Any
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        config = self.config
        q = given["q"].unflatten(-1, (config.n_heads, -1)) * self.key_dim**-0.5
        k, v, gate = (y.unflatten(-1, (config.kv_heads, -1)) for y in (given["k"], given["v"], self.decay_proj(x)))
        log_a = F.logsigmoid(gate.to(accumulation_dtype(gate.dtype))) / config.gate_normaliser  # [b, t, g, k]
        y, S = self.gla(
            q, k, v, log_a, initial_state=None if memory is None else memory["S"], segments=segments,
            chunk_size=config.chunk_size, n_tokens=x.shape[1],
        )
        gated = self.norm(y.flatten(-2), None if self.gate_proj is None else self.gate_proj(x))
        return self.out_proj(gated), {"S": S}
