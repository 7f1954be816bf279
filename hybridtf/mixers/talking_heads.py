"""Talking-heads attention (https://arxiv.org/abs/2003.02436): heads mix their scores, and after the softmax their weights.

    z_j = sum_i P_ij q_i . k_i / sqrt(k)        w_j = sum_i W_ij softmax_s(z_i)        y_t = out( sum_s w_j v_j )

over the keys s <= t of t's document; P and W are learned (h h) matrices.

Axes: b batch, t time, s keys, d d_model, h heads, g kv heads, k head_dim.

The layer is held to that of x-transformers, the op to plain loops over pairs of tokens and of heads.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from hybridtf.core import BuildContext, ParamSpec
from hybridtf.core.init import fan_in
from hybridtf.nn import HeadsConfig, HeadsMixer
from hybridtf.ops.attention import AttentionMask


class TalkingHeadsConfig(HeadsConfig):
    """Talking-heads attention: heads mix their scores before the softmax, their weights after it, or both."""

    type: Literal["talking_heads"] = "talking_heads"
    source: ClassVar[str] = "https://arxiv.org/abs/2003.02436"
    time_exponent: ClassVar[float] = 2.0

    mix_scores: bool = True
    """Before the softmax."""
    mix_weights: bool = True
    """After it."""

    @model_validator(mode="after")
    def _mixes_something(self) -> Self:
        if not (self.mix_scores or self.mix_weights):
            raise ValueError("heads that mix neither scores nor weights are those of 'attention'")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=4, n_kv_heads=2, head_dim=4)

    def build(self, ctx: BuildContext) -> TalkingHeads:
        return TalkingHeads(self, ctx)


class TalkingHeads(HeadsMixer):
    """See :class:`TalkingHeadsConfig`. Its state is a ``Growing`` of keys and values."""

    op = "talking_attention"

    def __init__(self, config: TalkingHeadsConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx, sites=("qk",))
        self.config, h = config, config.n_heads
        self.score_mix = nn.Parameter(torch.empty(h, h, **ctx.factory)) if config.mix_scores else None
        self.weight_mix = nn.Parameter(torch.empty(h, h, **ctx.factory)) if config.mix_weights else None

    def param_specs(self) -> dict[str, ParamSpec]:
        mixes = {"score_mix": self.score_mix, "weight_mix": self.weight_mix}
        specs = {name: ParamSpec("matrix", fan_in(mix)) for name, mix in mixes.items() if mix is not None}
        return {**super().param_specs(), **specs}

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        y: Tensor = self.attention(q, k, v, mask, self.score_mix, self.weight_mix, n_tokens=q.shape[1])
        return y
