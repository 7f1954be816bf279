"""Gated attention of Qwen3-Next (https://arxiv.org/abs/2505.06708; layer as in transformers ``qwen3_next``).

    q_t, z_t = q_proj(x_t)          q, k: RMS norm of each head, weight 1 + w; then rotary positions on a quarter of each head
    y_t = out( sigmoid(z_t) * sum_s softmax_s(q_t . k_s / sqrt(k)) v_s ),   s <= t in t's document

``q_proj`` is one matrix, all queries first and then all gates; a published checkpoint has them head by head.

Axes: b batch, t time, s keys, d d_model, h heads, g kv heads, k head_dim.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor

from hybridtf.core import BuildContext, Component, NormConfig, PositionConfig
from hybridtf.nn import HeadsConfig, HeadsMixer, RMSNormConfig, RopeConfig


class GatedAttentionConfig(HeadsConfig):
    """Qwen3-Next's attention: an output gate for each channel, normed queries and keys, partial rotary positions."""

    type: Literal["gated_attention"] = "gated_attention"
    source: ClassVar[str] = "https://arxiv.org/abs/2505.06708"
    time_exponent: ClassVar[float] = 2.0

    position: Component[PositionConfig] = Field(default_factory=lambda: RopeConfig(fraction=0.25))
    qk_norm: Component[NormConfig] = Field(default_factory=lambda: RMSNormConfig(unit_offset=True))
    """A norm of each head's queries and keys, before positions."""
    bias: bool = False
    """On all projections."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """On the attention weights, in training."""

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=4, n_kv_heads=2, head_dim=8)

    def build(self, ctx: BuildContext) -> GatedAttention:
        return GatedAttention(self, ctx)


class GatedAttention(HeadsMixer):
    """See :class:`GatedAttentionConfig`. Its state is a ``Growing`` of keys and values."""

    def __init__(self, config: GatedAttentionConfig, ctx: BuildContext) -> None:
        self.dropout = config.dropout
        inner = config.n_heads * config.width_in(ctx)
        super().__init__(
            config, ctx, q_width=2 * inner, qkv_bias=config.bias, out_bias=config.bias, qk_norm=config.qk_norm
        )
        self.config, self.inner = config, inner
        self.splits = {"q_proj": {"q": inner, "gate": inner}}

    def queries(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        q, gate = self.q_proj(x).split(self.inner, dim=-1)
        return q, gate
