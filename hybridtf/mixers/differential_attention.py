"""Differential attention (https://arxiv.org/abs/2410.05258): what two attentions have in common is taken away.

    o_t = sum_s (softmax_s(q1_t . k1_s / sqrt(k)) - lambda softmax_s(q2_t . k2_s / sqrt(k))) v_s,   s <= t in t's document
    y_t = out( (1 - lambda_init) norm(o_t) )           the norm is each head's own, over 2 k channels
    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init

``q_proj`` gives q1 of all heads, then q2 of all heads; ``k_proj`` likewise. A value is twice as wide as a key.

Axes: b batch, t time, s keys, d d_model, h heads, g kv heads, k head_dim.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import BuildContext, Component, NormConfig, ParamSpec, init
from hybridtf.nn import HeadsConfig, HeadsMixer, Held, RMSNormConfig, accumulation_dtype
from hybridtf.ops.attention import AttentionMask


class DifferentialAttentionConfig(HeadsConfig):
    """Differential attention: the difference of two softmax attentions. ``n_heads`` counts pairs; ``head_dim`` None:
    d_model / (2 n_heads)."""

    type: Literal["differential_attention"] = "differential_attention"
    source: ClassVar[str] = "https://arxiv.org/abs/2410.05258"
    time_exponent: ClassVar[float] = 2.0

    lambda_init: float | None = Field(default=None, gt=0, lt=1)
    """None: 0.8 - 0.6 exp(-0.3 l) for layer l, counted from 0."""
    norm: Component[NormConfig] = Field(default_factory=lambda: RMSNormConfig(eps=1e-5))
    """Of each head's output. DiffLlama's has no weight."""

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=2, n_kv_heads=1, head_dim=4)

    def build(self, ctx: BuildContext) -> DifferentialAttention:
        return DifferentialAttention(self, ctx)


class DifferentialAttention(HeadsMixer):
    """See :class:`DifferentialAttentionConfig`. Its state is a ``Growing`` of both keys, and values."""

    def __init__(self, config: DifferentialAttentionConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx, multiple=2, sites=("qk",))
        self.config = config
        q, k = self.q_proj.out_features // 2, self.k_proj.out_features // 2
        self.splits = {"q_proj": {"q1": q, "q2": q}, "k_proj": {"k1": k, "k2": k}}
        depth = 0.8 - 0.6 * math.exp(-0.3 * ctx.layer_idx)
        self.lambda_init = depth if config.lambda_init is None else config.lambda_init
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.empty(self.head_dim, **ctx.factory)) for _ in range(4)
        )
        self.norm = config.norm.build(ctx.child("norm", d_model=2 * self.head_dim))

    def kernel_sizes(self) -> dict[str, int]:
        return {
            "n_heads": self.n_heads // 2, "n_kv_heads": self.n_kv_heads // 2, "head_dim": self.head_dim,
            "v_dim": 2 * self.head_dim,
        }

    def param_specs(self) -> dict[str, ParamSpec]:
        names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
        return {**super().param_specs(), **dict.fromkeys(names, ParamSpec("state", init.normal(0.1)))}

    def held_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"k": (self.n_kv_heads, self.head_dim), "v": (self.n_kv_heads // 2, 2 * self.head_dim)}

    def weight_of_second(self) -> Tensor:
        """lambda, in float32 at least."""
        q1, k1, q2, k2 = (
            p.to(accumulation_dtype(p.dtype)) for p in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2)
        )
        return torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + self.lambda_init

    def read(self, q: Tensor, held: Held, mask: AttentionMask) -> Tensor:
        pairs = zip(q.chunk(2, dim=2), held["k"].chunk(2, dim=2), strict=True)
        first, second = (self.score(part, k, held["v"], mask) for part, k in pairs)
        wide = accumulation_dtype(q.dtype)
        return (first.to(wide) - self.weight_of_second() * second.to(wide)).to(q.dtype)

    def leave(self, y: Tensor, gate: Tensor | None) -> Tensor:
        return super().leave((1 - self.lambda_init) * self.norm(y), gate)
