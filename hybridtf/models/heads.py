"""Heads: from the residual stream to scores over the vocabulary."""

from __future__ import annotations

from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import BuildContext, Head, HeadConfig, ParamSpec, init
from hybridtf.core.init import fan_in


class LMHeadConfig(HeadConfig):
    """Scores of every token. ``tied``: the stem's embedding is the matrix, one tensor under the stem's name alone."""

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

    def build(self, ctx: BuildContext, vocab_size: int, embedding: nn.Embedding | None) -> LMHead:
        return LMHead(self, ctx, vocab_size, embedding)


class LMHead(Head):
    """See :class:`LMHeadConfig`."""

    def __init__(self, config: LMHeadConfig, ctx: BuildContext, vocab_size: int, embedding: nn.Embedding | None) -> None:
        super().__init__()
        self.config = config
        self.proj: nn.Linear | None = None
        # In a tuple, so that the stem's module is not registered here too: moving or materialising a model replaces
        # parameters module by module, and a second registration would come apart from the first.
        self.embedding: tuple[nn.Embedding, ...] = ()
        self.bias: nn.Parameter | None = None
        if not config.tied:
            self.proj = nn.Linear(ctx.d_model, vocab_size, bias=config.bias, **ctx.factory)
            return
        if embedding is None or tuple(embedding.weight.shape) != (vocab_size, ctx.d_model):
            raise ctx.error(f"tied = true needs a stem with an embedding of shape ({vocab_size}, {ctx.d_model})")
        self.embedding = (embedding,)
        if config.bias:
            self.bias = nn.Parameter(torch.zeros(vocab_size, **ctx.factory))

    def param_specs(self) -> dict[str, ParamSpec]:
        if self.proj is not None:
            return {"proj.weight": ParamSpec("head", fan_in(self.proj.weight))}
        return {} if self.bias is None else {"bias": ParamSpec("bias", init.constant(0.0))}

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(x, self.embedding[0].weight, self.bias) if self.proj is None else self.proj(x)
        if self.config.scale != 1.0:
            scores = scores * self.config.scale
        cap = self.config.softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)
