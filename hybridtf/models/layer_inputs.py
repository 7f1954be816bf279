"""Embeddings of a token for each layer (Gemma 3n and 4): an option of the stem, read by channel mixers ``edge_gate``.

    e_i = (norm(W_i x / sqrt(d)) + sqrt(l) E_i[token]) / sqrt(2)      for layer i, with x the model's embedding

The tables of all layers are one (v, n l), as are the projections (n l, d); layers that read none have no part in them.

Axes: b batch, t time, d d_model, l d_layer, n layers that read, v tokens.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor, nn

from hybridtf.channel_mixers.edge_gate import LAYER_INPUT
from hybridtf.core import BuildContext, Component, ConfigTable, EdgeSpec, NormConfig
from hybridtf.nn import RMSNormConfig
from hybridtf.nn.rounding import rounded


class LayerInputsConfig(ConfigTable):
    """What each layer is told of the token itself, beside the residual stream."""

    d_layer: int = Field(gt=0)
    """Width of what a layer is told."""
    vocab_size: int | None = Field(default=None, gt=0, examples=[5])
    """Tokens with rows of their own; all later ones take the first row (Gemma 3n). None: all."""
    norm: Component[NormConfig] = Field(default_factory=RMSNormConfig)
    """Of what is made from the embedding, one for all layers."""


class LayerInputs(nn.Module):
    """See :class:`LayerInputsConfig`. ``writes``: its edges, one a layer, (b t l) each."""

    def __init__(self, config: LayerInputsConfig, ctx: BuildContext, vocab_size: int) -> None:
        super().__init__()
        self.ctx, self.width, self.vocab_size = ctx, config.d_layer, config.vocab_size or vocab_size
        self.all_tokens = self.vocab_size >= vocab_size
        self.norm = config.norm.build(ctx.child("norm", d_model=self.width))
        self.writes = tuple(f"{LAYER_INPUT}_{i}" for i in range(ctx.n_layers))
        if not ctx.defer_init:  # the stem stands alone: no model will say which layers read
            self.make(self.writes)

    def make(self, writes: tuple[str, ...]) -> None:
        """Its parameters, for these edges; a model calls this once, when it knows who reads. Raises :class:`ConfigError` for
        none."""
        if not writes:
            raise self.ctx.error("layer_inputs are given, and no layer reads one: a channel mixer 'edge_gate' does")
        inner = len(writes) * self.width
        self.embedding = nn.Embedding(self.vocab_size, inner, **self.ctx.factory)
        self.proj = nn.Linear(self.ctx.d_model, inner, bias=False, **self.ctx.factory)
        self.writes = writes

    def edge_specs(self) -> dict[str, EdgeSpec]:
        """How its edges look."""
        return dict.fromkeys(self.writes, EdgeSpec((self.width,)))

    def forward(self, token_ids: Tensor, x: Tensor) -> dict[str, Tensor]:
        """Token ids (b t) and the model's embedding of them (b t d) to the edges."""
        known = token_ids if self.all_tokens else token_ids.where(token_ids < self.vocab_size, 0)
        told = self.embedding(known)
        told = told * rounded(self.width**0.5, told.dtype)
        made = self.norm((self.proj(x) * self.ctx.d_model**-0.5).unflatten(-1, (-1, self.width)))
        both = (made + told.unflatten(-1, (-1, self.width)).to(made.dtype)) * 2**-0.5
        return dict(zip(self.writes, both.unbind(-2), strict=True))
