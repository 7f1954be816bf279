"""``block_indexed_attention``: attention to the blocks of tokens that an indexer chooses, each by its best token (MiniMax-M3,
as transformers has it: https://huggingface.co/MiniMaxAI/MiniMax-M3).

    q: n_i heads of x_t, k_j: one key of x_j, both normed and told their positions;   I_tj = q_t . k_j / sqrt(d_i)
    block B scores max_{j in B, j <= t} I_tj;    C_t = the ``top_k`` blocks that score highest, the ``n_local`` last ones first
    y_t = out( softmax attention of t to the tokens of C_t, up to itself )

Each head of the indexer chooses for its share of the key heads. The open block is one of those that are scored. Blocks count
from the document's start. The choice has no gradient, and the indexer's input carries no graph: it learns, as
``indexed_attention``'s does, from the loss ``indexer_kl`` = KL(p_t || softmax over C_t of the blocks' scores), p_t the
attention's own weights on the blocks, over the heads that share the choice, and the mean over choosers. Scores take t^2,
attention t * top_k * block_size.

Axes: b batch, t time, s held tokens, d d_model, c heads of the indexer, n chosen blocks, l block_size, g key heads.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Component,
    Context,
    Edges,
    Extras,
    Growing,
    Law,
    NormConfig,
    PositionConfig,
    QueryKeyPosition,
    Segments,
    State,
)
from hybridtf.nn import HeadsConfig, HeadsMixer, RMSNormConfig, RopeConfig, indexer_kl, n_real, refuse_spans, told
from hybridtf.ops.block_sparse_attention import Held, hold
from hybridtf.ops.gather_attention import BestBlocks, best_blocks, index_products

LOSS = "indexer_kl"


class BlockIndexedAttentionConfig(HeadsConfig):
    """Attention in heads, grouped or not, to the blocks whose best token an indexer scores highest. Defaults are those of
    MiniMax-M3."""

    type: Literal["block_indexed_attention"] = "block_indexed_attention"
    source: ClassVar[str] = "https://huggingface.co/MiniMaxAI/MiniMax-M3"
    time_exponent: ClassVar[float] = 2.0

    block_size: int = Field(default=128, gt=0)
    top_k: int = Field(default=16, gt=0, examples=[3])
    """Blocks that a query attends to, those that it always does included."""
    n_local: int = Field(default=1, ge=0)
    """The last so many blocks, up to the query's own, are always among them."""
    index_n_heads: int = Field(default=4, gt=0, examples=[1])
    """Heads that choose, each for as many key heads: a divisor of these."""
    index_head_dim: int = Field(default=128, gt=0)
    index_norm: Component[NormConfig] = Field(default_factory=RMSNormConfig)
    """Of each head's queries and of the keys, before positions."""
    index_position: Component[PositionConfig] = Field(default_factory=RopeConfig)
    """Told on the indexer's queries and keys."""
    qk_norm: Component[NormConfig] | None = None
    """A norm of each head's queries and keys, before positions."""
    qkv_bias: bool = False
    out_bias: bool = False

    @model_validator(mode="after")
    def _choices_fit(self) -> Self:
        if self.n_local > self.top_k:
            raise ValueError(f"n_local = {self.n_local} blocks are more than top_k = {self.top_k}")
        if self.kv_heads % self.index_n_heads:
            raise ValueError(f"{self.kv_heads} key heads are not divisible by index_n_heads = {self.index_n_heads}")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(
            n_heads=4, n_kv_heads=2, head_dim=6, block_size=2, top_k=2, index_n_heads=2, index_head_dim=4,
        )

    def build(self, ctx: BuildContext) -> BlockIndexedAttention:
        return BlockIndexedAttention(self, ctx)


class BlockIndexer(nn.Module):
    """Queries and keys that score tokens."""

    def __init__(self, config: BlockIndexedAttentionConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.n_heads, self.width = config.index_n_heads, config.index_head_dim
        self.q_proj = nn.Linear(ctx.d_model, self.n_heads * self.width, bias=False, **ctx.factory)
        self.k_proj = nn.Linear(ctx.d_model, self.width, bias=False, **ctx.factory)
        self.q_norm = config.index_norm.build(ctx.child("index_norm", d_model=self.width))
        self.k_norm = config.index_norm.build(ctx.child("index_norm", d_model=self.width))
        self.position = config.index_position.build_at(ctx.child("index_position", d_model=self.width), "qk")
        refuse_spans(self.position, "index_position", ctx)

    def forward(
        self, x: Tensor, positions: Tensor, segments: Segments | None, leaf: Growing | None
    ) -> tuple[Tensor, Tensor]:
        """Queries (b t c k) and keys (b t k)."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.n_heads, self.width)))
        q, k = told(self.position, q, self.k_norm(self.k_proj(x))[:, :, None], positions, segments, leaf)
        return q, k[:, :, 0]


class Chosen(NamedTuple):
    """What a call's queries attend to."""

    blocks: BestBlocks
    tokens: Tensor
    """(b t c n*l), -1: none. What is later than a query is not seen."""


class BlockIndexedAttention(HeadsMixer):
    """See :class:`BlockIndexedAttentionConfig`. Its state is a ``Growing`` of keys, values and the indexer's keys."""

    op = "gather_attention"
    losses: tuple[str, ...] = (LOSS,)

    def __init__(self, config: BlockIndexedAttentionConfig, ctx: BuildContext) -> None:
        super().__init__(
            config, ctx, qkv_bias=config.qkv_bias, out_bias=config.out_bias, qk_norm=config.qk_norm, sites=("qk",)
        )
        self.config, self.causal_only, self.takes = config, True, ()
        refuse_spans(self.position, "position", ctx)
        self.indexer = BlockIndexer(config, ctx.child("indexer"))
        position = self.indexer.position
        if isinstance(position, QueryKeyPosition):
            broken: dict[Law, str] = dict(position.cannot)
            self.cannot, self.uses_max_len = {**self.cannot, **broken}, self.uses_max_len or position.uses_max_len

    def held_shapes(self) -> dict[str, tuple[int, ...]]:
        return {**super().held_shapes(), "index_k": (self.config.index_head_dim,)}

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0, edges: Edges | None = None,
    ) -> tuple[Any, ...]:
        leaf = state if isinstance(state, Growing) else None
        x, positions = self.enter(x, segments, state, leaf)
        q, new, gate, _ = self.project(x, positions, segments, leaf)
        index_q, index_k = self.indexer(x.detach(), positions, segments, leaf)
        held = hold(leaf, {**new, "index_k": index_k}, segments, keep=keep)
        chosen = self._chosen(index_q, held)
        y, mass = self._look_at(q, held, chosen)
        keys, scale = held.data["index_k"], self.config.index_head_dim**-0.5
        scores = index_products(index_q, keys, chosen.blocks.tokens, held.places, scale)
        loss = indexer_kl(scores, mass, chosen.blocks.blocks) / self.config.index_n_heads
        count = n_real((x.shape[0], x.shape[1]), segments, x.device)
        return self.leave(y, gate), state if leaf is None else held.leaf, Extras(losses={LOSS: (loss, count)})

    def _chosen(self, index_q: Tensor, held: Held) -> Chosen:
        config = self.config
        found = best_blocks(
            index_q, held.data["index_k"], held.places, config.top_k, size=config.block_size, local=config.n_local
        )
        steps = torch.arange(config.block_size, device=index_q.device)
        tokens = torch.where(found.blocks[..., None] < 0, -1, found.blocks[..., None] * config.block_size + steps)
        return Chosen(found, tokens.flatten(3))

    def _look_at(self, q: Tensor, held: Held, chosen: Chosen) -> tuple[Tensor, Tensor]:
        """What the queries read (b t h v), and their weights on the blocks (b t c n)."""
        config, tokens = self.config, chosen.tokens
        shared = self.n_kv_heads // config.index_n_heads
        if config.index_n_heads > 1 and shared > 1:
            tokens = tokens.repeat_interleave(shared, 2)
        k, v = held.data["k"].to(q.dtype), held.data["v"].to(q.dtype)
        y, mass = self.attention(q, k, v, tokens, held.places, n_tokens=q.shape[1])
        return y, mass.unflatten(3, (config.top_k, config.block_size)).sum(4).unflatten(2, (config.index_n_heads, -1)).sum(3)
