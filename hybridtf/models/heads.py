"""Heads: from the residual stream to scores over the vocabulary."""

from __future__ import annotations

from typing import Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Component,
    ConfigTable,
    Head,
    HeadConfig,
    NormConfig,
    ParamSpec,
    Segments,
    State,
    check_call,
    init,
)
from hybridtf.core.init import fan_in
from hybridtf.nn import Activation, FactorConfig, LayerNormConfig, activation


class HeadTransform(ConfigTable):
    """A layer before the scores: norm(act(dense(x))), as in BERT and its kin."""

    activation: Activation = "gelu"
    bias: bool = False
    norm: Component[NormConfig] = Field(default_factory=LayerNormConfig)


class LMHeadConfig(HeadConfig):
    """Scores of every token. ``tied``: the stem's embedding is the matrix, and the head has none of its own."""

    type: Literal["lm_head"] = "lm_head"
    tied: bool = True
    bias: bool = False
    scale: float = Field(default=1.0, gt=0)
    """Multiplies the scores."""
    token_factor: FactorConfig | None = Field(default=None, examples=[{"start": 1.5}])
    """Multiplies the scores of each token of the vocabulary (nGPT)."""
    softcap: float | None = Field(default=None, gt=0)
    """Scores become softcap * tanh(score / softcap)."""
    transform: HeadTransform | None = Field(default=None, examples=[{"activation": "gelu"}])
    """A layer that the stream goes through first (ModernBERT). None: it does not."""

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext, vocab_size: int) -> LMHead:
        return LMHead(self, ctx, vocab_size)


class TransformedStream(nn.Module):
    """See :class:`HeadTransform`."""

    def __init__(self, config: HeadTransform, ctx: BuildContext) -> None:
        super().__init__()
        self.dense = nn.Linear(ctx.d_model, ctx.d_model, bias=config.bias, **ctx.factory)
        self.act = activation(config.activation)
        self.norm = config.norm.build(ctx.child("norm"))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.act(self.dense(x)))
        return y


class LMHead(Head):
    """See :class:`LMHeadConfig`."""

    def __init__(self, config: LMHeadConfig, ctx: BuildContext, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.needs_tied_weight = config.tied
        self.transform = None if config.transform is None else TransformedStream(config.transform, ctx.child("transform"))
        self.proj = None if config.tied else nn.Linear(ctx.d_model, vocab_size, bias=config.bias, **ctx.factory)
        self.token_factor = None if config.token_factor is None else config.token_factor.build(ctx, vocab_size)
        self.bias = nn.Parameter(torch.zeros(vocab_size, **ctx.factory)) if config.tied and config.bias else None

    def param_specs(self) -> dict[str, ParamSpec]:
        if self.proj is not None:
            return {"proj.weight": ParamSpec("head", fan_in(self.proj.weight))}
        return {} if self.bias is None else {"bias": ParamSpec("bias", init.constant(0.0))}

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, keep: int = 0,
        tied: Tensor | None = None,
    ) -> tuple[Tensor, State | None]:
        check_call(self, x, segments, state)
        x = x if self.transform is None else self.transform(x)
        if self.proj is not None:
            scores = self.proj(x)
        else:
            assert tied is not None, "a tied head is called with the stem's matrix"
            scores = F.linear(x, tied, self.bias)
        scores = scores if self.token_factor is None else self.token_factor(scores)
        if self.config.scale != 1.0:
            scores = scores * self.config.scale
        cap = self.config.softcap
        return (scores if cap is None else cap * torch.tanh(scores / cap)), state
