"""Stems: from token ids to the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Component,
    DataError,
    EdgeSpec,
    Extras,
    Fixed,
    NormConfig,
    PositionConfig,
    Segments,
    State,
    Stem,
    StemConfig,
    check_call,
)
from hybridtf.models.layer_inputs import LayerInputs, LayerInputsConfig
from hybridtf.nn import ChannelAffine, NoPositionConfig
from hybridtf.nn.rounding import rounded


class TokenEmbeddingConfig(StemConfig):
    """A learned vector for each token, optionally scaled, with positions added where a position of site ``input`` is given."""

    type: Literal["token_embedding"] = "token_embedding"
    position: Component[PositionConfig] = Field(default_factory=NoPositionConfig)
    scale: Annotated[float, Field(gt=0)] | Literal["sqrt_d_model"] = 1.0
    """Multiplies the embedding; ``sqrt_d_model``: the root of the width (the original transformer, Gemma), rounded to the
    embedding's dtype. A model that rounds the root to bfloat16 in every precision (RecurrentGemma: 50.5 for 2560) gives the
    rounded number."""
    affine: bool = False
    """To the embedding, positions included, a learned vector is added, and it is multiplied by another (ZAYA)."""
    norm: Component[NormConfig] | None = Field(default=None, examples=[{"type": "rms_norm"}])
    """Of the embedding, positions included (Inkling 2, BLOOM, BERT). None: as it is."""
    layer_inputs: LayerInputsConfig | None = Field(default=None, examples=[{"d_layer": 4}])
    """Further embeddings of each token, one for each layer that reads it (Gemma 3n, Gemma 4)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)

    @classmethod
    def tiny(cls) -> Self:
        return cls()

    def build(self, ctx: BuildContext, vocab_size: int) -> TokenEmbedding:
        return TokenEmbedding(self, ctx, vocab_size)


class TokenEmbedding(Stem):
    """See :class:`TokenEmbeddingConfig`. Its state, only with positions: the tokens seen so far."""

    def __init__(self, config: TokenEmbeddingConfig, ctx: BuildContext, vocab_size: int) -> None:
        super().__init__()
        self.scale = ctx.d_model**0.5 if config.scale == "sqrt_d_model" else config.scale
        self.rounds = config.scale == "sqrt_d_model"
        self.embedding = nn.Embedding(vocab_size, ctx.d_model, **ctx.factory)
        self.position = config.position.build_at(ctx.child("position"), "input")
        self.affine = ChannelAffine(ctx.child("affine")) if config.affine else None
        self.norm = None if config.norm is None else config.norm.build(ctx.child("norm"))
        self.dropout = nn.Dropout(config.dropout)
        self.layer_inputs: LayerInputs | None = None
        if config.layer_inputs is not None:
            self.layer_inputs = LayerInputs(config.layer_inputs, ctx.child("layer_inputs"), vocab_size)
            self.writes = (*type(self).writes, *self.layer_inputs.writes)

    def edge_specs(self) -> Mapping[str, EdgeSpec]:
        own = {"embedding": EdgeSpec((self.embedding.embedding_dim,))}
        return own if self.layer_inputs is None else {**own, **self.layer_inputs.edge_specs()}

    def unread(self, edges: frozenset[str]) -> None:
        if self.layer_inputs is not None:
            self.layer_inputs.make(tuple(edge for edge in self.layer_inputs.writes if edge not in edges))
            self.writes = (*type(self).writes, *self.layer_inputs.writes)

    def tied_weight(self) -> Tensor:
        return self.embedding.weight

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        if self.position is None:
            return ()
        return Fixed.empty(batch_size, {}, max_len=max_len, dtype=torch.int64, device=self.embedding.weight.device)

    def forward(
        self, inputs: Tensor, *, segments: Segments | None = None, state: State | None = None, keep: int = 0
    ) -> tuple[Tensor, State | None, Extras]:
        """``inputs`` (b t) int64 to x (b t d); raises :class:`DataError` for an id outside the vocabulary."""
        check_call(self, inputs, segments, state)
        self._check(inputs)
        embedded = self.embedding(inputs)
        x = embedded if self.scale == 1.0 else embedded * self._factor(embedded.dtype)
        if self.position is not None:
            length = state.length if isinstance(state, Fixed) else None
            if segments is None:
                positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
                positions = positions if length is None else positions + length[:, None]
            else:
                positions = torch.where(segments.real, segments.positions(length), torch.zeros_like(inputs))
            x = self.position(x, positions)
            if isinstance(state, Fixed):
                state = _counted(state, segments, inputs.shape[1], keep)
        x = x if self.affine is None else self.affine(x)
        x = x if self.norm is None else self.norm(x)
        edges = {"token_ids": inputs, "embedding": x}
        if self.layer_inputs is not None:
            edges |= self.layer_inputs(inputs, x)
        return self.dropout(x), state, Extras(edges=edges)

    def _factor(self, dtype: torch.dtype) -> float:
        """The root of d_model is rounded to the embedding's dtype, as Gemma has it; a number that is given is not."""
        return rounded(self.scale, dtype) if self.rounds else self.scale

    def _check(self, inputs: Tensor) -> None:
        if torch.compiler.is_compiling() or not inputs.numel() or inputs.is_meta:
            return
        low, high = (int(v) for v in torch.aminmax(inputs))
        n = self.embedding.num_embeddings
        if low < 0 or high >= n:
            raise DataError(f"token id {low if low < 0 else high} is outside the vocabulary of {n}")


def _counted(state: Fixed, segments: Segments | None, n_tokens: int, keep: int) -> Fixed:
    """The count after the call. A count can be cropped by any amount within the document: every earlier one is known."""
    if not keep:
        return state.advance({}, segments, n_tokens)
    steps = torch.arange(min(keep, n_tokens), 0, -1, device=state.length.device)
    length = state.length + n_tokens if segments is None else segments.new_length(state.length)
    past = length[:, None] - steps
    return state.advance({}, segments, n_tokens, past_length=torch.where(past >= 0, past, -1))
