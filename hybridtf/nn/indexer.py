"""A lightning indexer: the small, trained scorer that chooses tokens for an attention.

    I_tj = sum_h w_th relu(q_th . k_j) / sqrt(d_i n_i),   j <= t in t's document
    DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556): w of x_t; k_j normed
    QSA (transformers ``qwen4_exp``): w_th = sqrt(n_i); q_th normed

With ``index_pool`` the keys of so many tokens, counted from the document's start, become one as soon as all are there:

    gated (GLM-5-Next)   c_j = sum_l softmax_l(gate_l + bias_l) * k_l, channel by channel; k normed, and told positions, before
    mean (QSA)           c_j = norm(mean_l k_l), told the position of the block's first token

Axes: b batch, t time, d d_model, j blocks that end in a call, l index_pool, h heads, k index_head_dim.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Component,
    Growing,
    NormConfig,
    ParamSpec,
    Position,
    PositionConfig,
    QueryKeyPosition,
    Segments,
    SequenceMixerConfig,
    init,
)
from hybridtf.nn.norms import LayerNormConfig, accumulation_dtype
from hybridtf.nn.pooled import Ended, tokens_of
from hybridtf.nn.positions import RopeConfig, told, told_at
from hybridtf.ops.block_sparse_attention import Held


class IndexedConfig(SequenceMixerConfig):
    """What mixers with a lightning indexer are told of it. Defaults are DeepSeek-V3.2's."""

    index_n_heads: int = Field(default=64, gt=0)
    index_head_dim: int = Field(default=128, gt=0)
    index_top_k: int = Field(default=2048, gt=0)
    """Tokens that a query attends to, itself or not; with fewer before it, all of them."""
    index_pool: int = Field(default=1, gt=0, examples=[2])
    """Tokens that are scored and chosen as one block (4 in GLM-5-Next); of these index_top_k // index_pool are chosen."""
    index_pooling: Literal["gated", "mean"] = "gated"
    """How the keys of a block become one, if it has several: by learned gates (GLM-5-Next), or their mean (QSA)."""
    index_weights: bool = True
    """Each query weighs the scores of its heads. Off: they are added up (QSA)."""
    index_q_norm: Component[NormConfig] | None = Field(default=None, examples=[{"type": "rms_norm"}])
    """Of each head's queries, before positions."""
    index_k_norm: Component[NormConfig] = Field(default_factory=lambda: LayerNormConfig(eps=1e-6))
    """Of the keys, before positions."""
    index_position: Component[PositionConfig] = Field(default_factory=RopeConfig)
    """Told on the first channels of the indexer's queries and keys."""
    index_choice: Literal["own", "write", "read"] = "own"
    """``write``: later layers may attend to what this one has chosen. ``read``: this layer has no indexer, and attends to what
    the last layer before it with ``write`` has chosen, whose index_top_k and index_pool it has (GLM-5's "shared"); no other
    option of an indexer counts then."""

    @model_validator(mode="after")
    def _a_block_is_chosen(self) -> Self:
        if self.index_top_k < self.index_pool:
            raise ValueError(f"index_top_k = {self.index_top_k} is less than a block of index_pool = {self.index_pool} tokens")
        return self

    @property
    def n_choices(self) -> int:
        """Tokens that a query attends to at most: those of the chosen blocks, and those of the open one."""
        return self.index_top_k // self.index_pool * self.index_pool + self.index_pool - 1


class Asked(NamedTuple):
    """An indexer's side of a call's tokens."""

    q: Tensor
    """(b t h k)"""
    weights: Tensor
    """(b t h), with the scale of the scores."""
    held: dict[str, Tensor]
    """(b t k) by name, to be held: the key, and its gate where there are gates."""


class Indexer(nn.Module):
    """Queries of ``d_source`` channels, keys and weights of x; ``rotated`` channels are told their position."""

    def __init__(self, config: IndexedConfig, ctx: BuildContext, d_source: int, rotated: int) -> None:
        super().__init__()
        self.n_heads, self.width = config.index_n_heads, config.index_head_dim
        if rotated > self.width:
            raise ctx.error(f"index_head_dim = {self.width} is less than the {rotated} channels that tell a position")
        self.q_proj = nn.Linear(d_source, self.n_heads * self.width, bias=False, **ctx.factory)
        self.k_proj = nn.Linear(ctx.d_model, self.width, bias=False, **ctx.factory)
        self.weights_proj = nn.Linear(ctx.d_model, self.n_heads, bias=False, **ctx.factory) if config.index_weights else None
        self.k_norm, q_norm = config.index_k_norm.build(ctx.child("index_k_norm", d_model=self.width)), config.index_q_norm
        self.q_norm = None if q_norm is None else q_norm.build(ctx.child("index_q_norm", d_model=self.width))
        self.pool, self.by_mean = config.index_pool, config.index_pool > 1 and config.index_pooling == "mean"
        gated = self.pool > 1 and not self.by_mean
        self.gate_proj = nn.Linear(ctx.d_model, self.width, bias=False, **ctx.factory) if gated else None
        self.gate_bias = nn.Parameter(torch.empty(self.pool, self.width, **ctx.factory)) if gated else None
        self.position = config.index_position.build_at(ctx.child("index_position", d_model=rotated), "qk")
        refuse_spans(self.position, "index_position", ctx)

    def param_specs(self) -> dict[str, ParamSpec]:
        return {} if self.gate_bias is None else {"gate_bias": ParamSpec("state", init.constant(0.0))}

    def held_shapes(self) -> dict[str, tuple[int, ...]]:
        """What is held of a token."""
        names = ("index_k",) if self.gate_proj is None else ("index_k", "index_gate")
        return dict.fromkeys(names, (self.width,))

    def forward(
        self, x: Tensor, source: Tensor, positions: Tensor, segments: Segments | None, leaf: Growing | None
    ) -> Asked:
        q, k = self.q_proj(source).unflatten(-1, (self.n_heads, self.width)), self.k_proj(x)
        q = q if self.q_norm is None else self.q_norm(q)
        normed = k if self.by_mean else self.k_norm(k)
        q, of_token = told(self.position, q, normed[:, :, None], positions, segments, leaf)
        held = {"index_k": k if self.by_mean else of_token[:, :, 0]}
        if self.gate_proj is not None:
            held["index_gate"] = self.gate_proj(x)
        if self.weights_proj is None:
            return Asked(q, q.new_full(q.shape[:3], self.width**-0.5), held)
        return Asked(q, self.weights_proj(x) * (self.width * self.n_heads) ** -0.5, held)

    def of_blocks(self, tokens: Held, ends: Ended, segments: Segments | None, leaf: Growing | None) -> Tensor:
        """(b j k): a key of each block that ends in a call, of the ``tokens`` in reach."""
        keys = tokens_of(tokens.data["index_k"], ends)
        wide = accumulation_dtype(keys.dtype)
        if self.gate_bias is not None:
            gates = tokens_of(tokens.data["index_gate"], ends)
            weights = (gates.to(wide) + self.gate_bias.to(wide)).softmax(2)
            return (weights * keys.to(wide)).sum(2).to(keys.dtype)
        pooled = self.k_norm(keys.to(wide).mean(2).to(keys.dtype))
        places = tokens.places.position
        return told_at(self.position, pooled[:, :, None], places, ends.columns, self.pool - 1, segments, leaf)[:, :, 0]


def refuse_spans(position: Position | None, option: str, ctx: BuildContext) -> None:
    """Raises :class:`ConfigError` for a position that is told as scores are taken, of some queries at a time."""
    if isinstance(position, QueryKeyPosition) and any(position.span(d) for d in (torch.float32, torch.float64)):
        raise ctx.error(f"{option} is told again at each read, which a choice of tokens cannot be; use 'rope'")
