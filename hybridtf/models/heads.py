"""Heads: from the residual stream to scores over the vocabulary."""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import BuildContext, Head, HeadConfig, ParamSpec
from hybridtf.core.init import fan_in


class LMHeadConfig(HeadConfig):
    """Scores of every token. ``tied``: the stem's embedding is the matrix, one tensor under one name."""

    type: Literal["lm_head"] = "lm_head"
    tied: bool = True
    bias: bool = False
    scale: float = Field(default=1.0, gt=0)
    """Multiplies the scores."""
    softcap: float | None = Field(default=None, gt=0)
    """Scores become softcap * tanh(score / softcap)."""

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext, vocab_size: int, embedding: Tensor | None) -> LMHead:
        return LMHead(self, ctx, vocab_size, embedding)


class LMHead(Head):
    """See :class:`LMHeadConfig`."""

    def __init__(self, config: LMHeadConfig, ctx: BuildContext, vocab_size: int, embedding: Tensor | None) -> None:
        super().__init__()
        self.config = config
        self.proj = nn.Linear(ctx.d_model, vocab_size, bias=config.bias, **ctx.factory)
        if config.tied:
            if embedding is None:
                raise ctx.error("tied = true needs a stem with an embedding")
            if not isinstance(embedding, nn.Parameter) or embedding.shape != self.proj.weight.shape:
                raise ctx.error("tied = true needs an embedding of the model's width and vocabulary")
            self.proj.weight = embedding

    def param_specs(self) -> dict[str, ParamSpec]:
        return {} if self.config.tied else {"proj.weight": ParamSpec("head", fan_in(self.proj.weight))}

    def forward(self, x: Tensor) -> Tensor:
        scores = self.proj(x)
        if self.config.scale != 1.0:
            scores = scores * self.config.scale
        cap = self.config.softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)
