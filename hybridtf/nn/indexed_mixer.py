"""The base of mixers whose queries attend to the tokens that a small, trained scorer chooses: a lightning indexer
(DeepSeek-V3.2, https://arxiv.org/abs/2512.02556).

    I_tj = sum_h w_th relu(q_th . k_j) / sqrt(d_i n_i),   j <= t in t's document;   C_t: the ``index_top_k`` highest
    y_t  = softmax attention of t to C_t;   loss: KL( p_t || softmax_{C_t} I_t ),  p_t the attention's own weights over heads

With ``index_pool`` the keys of so many tokens, counted from the document's start, become one as soon as all are there (GLM-5):
c_j = sum_l softmax_l(gate_l + bias_l) * k_l, channel by channel. Whole blocks are scored and chosen, and the tokens after the
last complete block are always seen.

Axes: b batch, t time, s held tokens, d d_model, n choices, m chosen blocks, j blocks that end in a call, l index_pool, h heads.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple, Self

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
    ParamSpec,
    Position,
    PositionConfig,
    QueryKeyPosition,
    Ring,
    Segments,
    SequenceMixerConfig,
    State,
    init,
)
from hybridtf.nn.counts import n_real
from hybridtf.nn.norms import LayerNorm, accumulation_dtype
from hybridtf.nn.pooled import empty_pooled, ended, entries_seen, pooled_with, tokens_of
from hybridtf.nn.positions import RopeConfig, told
from hybridtf.nn.softmax_mixer import SoftmaxMixer
from hybridtf.ops.block_sparse_attention import Held, hold
from hybridtf.ops.gather_attention import choose_tokens, index_scores

LOSS = "indexer_kl"


class IndexedConfig(SequenceMixerConfig):
    """What mixers with a lightning indexer are told of it. Defaults are DeepSeek-V3.2's."""

    index_n_heads: int = Field(default=64, gt=0)
    index_head_dim: int = Field(default=128, gt=0)
    index_top_k: int = Field(default=2048, gt=0)
    """Tokens that a query attends to, itself or not; with fewer before it, all of them."""
    index_pool: int = Field(default=1, gt=0, examples=[2])
    """Tokens that are scored and chosen as one block (4 in GLM-5-Next); of these index_top_k // index_pool are chosen."""
    index_position: Component[PositionConfig] = Field(default_factory=RopeConfig)
    """Told on the first channels of the indexer's queries and keys."""

    @model_validator(mode="after")
    def _a_block_is_chosen(self) -> Self:
        if self.index_top_k < self.index_pool:
            raise ValueError(f"index_top_k = {self.index_top_k} is less than a block of index_pool = {self.index_pool} tokens")
        return self


class Asked(NamedTuple):
    """An indexer's side of a call's tokens."""

    q: Tensor
    """(b t h k)"""
    weights: Tensor
    """(b t h), with the scale of the scores."""
    held: dict[str, Tensor]
    """(b t k) by name, to be held: the key, and its gate where keys are pooled."""


class Choice(NamedTuple):
    """What each query attends to, and what the indexer said of it."""

    tokens: Tensor
    """(b t n), -1: none."""
    ids: Tensor
    """(b t m) the tokens or blocks that were chosen."""
    scores: Tensor
    """(b t m)"""
    leaves: dict[str, Any]
    """States of the indexer's own after the call."""


class Indexer(nn.Module):
    """Queries of ``d_source`` channels, keys and weights of x; ``rotated`` channels are told their position."""

    def __init__(self, config: IndexedConfig, ctx: BuildContext, d_source: int, rotated: int) -> None:
        super().__init__()
        self.n_heads, self.width = config.index_n_heads, config.index_head_dim
        if rotated > self.width:
            raise ctx.error(f"index_head_dim = {self.width} is less than the {rotated} channels that tell a position")
        self.q_proj = nn.Linear(d_source, self.n_heads * self.width, bias=False, **ctx.factory)
        self.k_proj = nn.Linear(ctx.d_model, self.width, bias=False, **ctx.factory)
        self.weights_proj = nn.Linear(ctx.d_model, self.n_heads, bias=False, **ctx.factory)
        self.k_norm = LayerNorm(ctx.child("k_norm", d_model=self.width), 1e-6, True)
        self.pool = config.index_pool
        pooled = self.pool > 1
        self.gate_proj = nn.Linear(ctx.d_model, self.width, bias=False, **ctx.factory) if pooled else None
        self.gate_bias = nn.Parameter(torch.empty(self.pool, self.width, **ctx.factory)) if pooled else None
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
        q = self.q_proj(source).unflatten(-1, (self.n_heads, self.width))
        q, k = told(self.position, q, self.k_norm(self.k_proj(x))[:, :, None], positions, segments, leaf)
        held = {"index_k": k[:, :, 0]}
        if self.gate_proj is not None:
            held["index_gate"] = self.gate_proj(x)
        return Asked(q, self.weights_proj(x) * (self.width * self.n_heads) ** -0.5, held)

    def pooled(self, keys: Tensor, gates: Tensor) -> Tensor:
        """Keys and gates of blocks (b j l k) to a key each (b j k)."""
        assert self.gate_bias is not None
        wide = accumulation_dtype(gates.dtype)
        weights = (gates.to(wide) + self.gate_bias.to(wide)).softmax(2)
        return (weights * keys.to(wide)).sum(2).to(keys.dtype)


def refuse_spans(position: Position | None, option: str, ctx: BuildContext) -> None:
    """Raises :class:`ConfigError` for a position that is told as scores are taken, of some queries at a time."""
    if isinstance(position, QueryKeyPosition) and any(position.span(d) for d in (torch.float32, torch.float64)):
        raise ctx.error(f"{option} is told again at each read, which a choice of tokens cannot be; use 'rope'")


class IndexedMixer(SoftmaxMixer):
    """Put before a base that projects (``HeadsMixer``, ``LatentMixer``): its state then holds the indexer's keys too.

    The indexer sees x and the queries' source without their graph, and learns from its loss alone.
    """

    op = "gather_attention"
    losses: tuple[str, ...] = (LOSS,)
    indexer: Indexer
    top_k: int

    @abstractmethod
    def look(self, q: Tensor, held: Held, index: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (b t h k) over the tokens (b t 1 n): outputs (b t h v), and the weights of each token (b t 1 n)."""

    def place(self, position: Position | None, *, looks_back: bool = True) -> None:
        super().place(position, looks_back=looks_back)

    def add_indexer(self, config: IndexedConfig, ctx: BuildContext, d_source: int, rotated: int) -> None:
        """To be called once the base is built."""
        refuse_spans(self.position, "position", ctx)
        self.indexer, self.top_k = Indexer(config, ctx.child("indexer"), d_source, rotated), config.index_top_k
        position = self.indexer.position
        if isinstance(position, QueryKeyPosition):
            broken: dict[Law, str] = dict(position.cannot)
            self.cannot, self.uses_max_len = {**self.cannot, **broken}, self.uses_max_len or position.uses_max_len

    def index_shapes(self) -> dict[str, tuple[int, ...]]:
        """What is held of a token beside the attention's own: a mixer's ``held_shapes`` adds it to its base's."""
        return self.indexer.held_shapes() if self.indexer.pool == 1 else {}

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        keys, pool = super().init_state(batch_size, max_len), self.indexer.pool
        if pool == 1:
            return keys
        where: dict[str, Any] = {"dtype": self.attention.compute_dtype, "device": self.attention.device}
        shapes = self.indexer.held_shapes()
        pooled = empty_pooled(batch_size, {"index_k": shapes["index_k"]}, pool, max_len, **where)
        return {"keys": keys, "open": Ring.empty(batch_size, shapes, window=pool, max_len=max_len, **where), "pooled": pooled}

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0, edges: Edges | None = None,
    ) -> tuple[Any, ...]:
        leaves: dict[str, Any] = state if isinstance(state, dict) else {"keys": state}
        leaf = leaves["keys"]
        x, positions = self.enter(x, segments, state, leaf)
        q, new, gate, source = self.project(x, positions, segments, leaf)
        source = x if source is None else source
        asked = self.indexer(x.detach(), source.detach(), positions, segments, leaf)
        by_token = self.indexer.pool == 1
        held = hold(leaf, {**new, **(asked.held if by_token else {})}, segments, keep=keep)
        choice = self._tokens(asked, held) if by_token else self._blocks(asked, held, leaves, segments, keep)
        y, mass = self.look(q, held, choice.tokens[:, :, None])
        m = choice.ids.shape[2]
        of_block = mass[:, :, 0, : m * self.indexer.pool].unflatten(-1, (m, self.indexer.pool)).sum(-1)
        loss = indexer_kl(choice.scores, of_block, choice.ids)
        count = n_real((x.shape[0], x.shape[1]), segments, x.device)
        after = {"keys": held.leaf, **choice.leaves} if choice.leaves and state is not None else held.leaf
        return self.leave(y, gate), after, Extras(losses={LOSS: (loss, count)})

    def _tokens(self, asked: Asked, held: Held) -> Choice:
        keys = held.data["index_k"]
        ids = choose_tokens(asked.q, asked.weights, keys, held.places, self.top_k)
        return Choice(ids, ids, index_scores(asked.q, asked.weights, keys, ids, held.places), {})

    def _blocks(
        self, asked: Asked, held: Held, leaves: dict[str, Any], segments: Segments | None, keep: int
    ) -> Choice:
        """Complete blocks that score highest, and the tokens after the last of them."""
        pool, places = self.indexer.pool, held.places
        tokens = hold(leaves.get("open"), asked.held, segments, keep=keep)
        ends = ended(tokens, pool, pool)
        entries = self.indexer.pooled(*(tokens_of(tokens.data[name], ends) for name in ("index_k", "index_gate")))
        pooled = pooled_with(leaves.get("pooled"), {"index_k": entries}, ends, segments)
        keys, where = pooled.data["index_k"], entries_seen(pooled.first, ends, places, pool, pool)
        ids = choose_tokens(asked.q, asked.weights, keys, where, self.top_k // pool)
        steps = torch.arange(pool, device=ids.device)
        chosen = torch.where(ids[..., None] < 0, -1, ids[..., None] * pool + steps).flatten(2)
        tail = ends.done[..., None] * pool + steps[:-1]  # what is later than the query is not seen
        scores = index_scores(asked.q, asked.weights, keys, ids, where)
        return Choice(torch.cat([chosen, tail], -1), ids, scores, {"open": tokens.leaf, "pooled": pooled.leaf})


def indexer_kl(scores: Tensor, mass: Tensor, ids: Tensor) -> Tensor:
    """Sum over queries of KL(p || softmax of the scores), p the attention's weights (b t n) on its choices, summing to 1."""
    seen = ids >= 0
    p = mass / mass.sum(-1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
    alone = ~seen.any(-1, keepdim=True)
    log = scores.masked_fill(~seen, -torch.inf).masked_fill(alone, 0.0).log_softmax(-1).masked_fill(~seen, 0.0)
    return (torch.xlogy(p, p) - p * log).sum()
