"""The base of mixers whose queries attend to the tokens that a small, trained scorer chooses: a lightning indexer
(DeepSeek-V3.2, https://arxiv.org/abs/2512.02556).

    I_tj = sum_h w_th relu(q_th . k_j) / sqrt(d_i n_i),   j <= t in t's document;   C_t: the ``index_topk`` highest
    y_t  = softmax attention of t to C_t;   loss: KL( p_t || softmax_{C_t} I_t ),  p_t the attention's own weights over heads

Axes: b batch, t time, s held tokens, d d_model, n choices, h heads.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    Component,
    Context,
    Edges,
    Extras,
    Growing,
    Law,
    Position,
    PositionConfig,
    QueryKeyPosition,
    Segments,
    SequenceMixerConfig,
    State,
)
from hybridtf.nn.counts import n_real
from hybridtf.nn.norms import LayerNorm
from hybridtf.nn.positions import RopeConfig, told
from hybridtf.nn.softmax_mixer import SoftmaxMixer
from hybridtf.ops.block_sparse_attention import Held, Places, hold
from hybridtf.ops.gather_attention import choose_tokens, index_scores

LOSS = "indexer_kl"


class IndexedConfig(SequenceMixerConfig):
    """What mixers with a lightning indexer are told of it. Defaults are DeepSeek-V3.2's."""

    index_n_heads: int = Field(default=64, gt=0)
    index_head_dim: int = Field(default=128, gt=0)
    index_topk: int = Field(default=2048, gt=0)
    """Tokens that a query attends to, itself or not; with fewer before it, all of them."""
    index_position: Component[PositionConfig] = Field(default_factory=RopeConfig)
    """Told on the first channels of the indexer's queries and keys."""


class Asked(NamedTuple):
    """An indexer's side of a call's tokens."""

    q: Tensor
    """(b t h k)"""
    weights: Tensor
    """(b t h), with the scale of the scores."""
    key: Tensor
    """(b t k), to be held."""


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
        self.position = config.index_position.build_at(ctx.child("index_position", d_model=rotated), "qk")
        refuse_spans(self.position, "index_position", ctx)

    def forward(
        self, x: Tensor, source: Tensor, positions: Tensor, segments: Segments | None, leaf: Growing | None
    ) -> Asked:
        q = self.q_proj(source).unflatten(-1, (self.n_heads, self.width))
        q, k = told(self.position, q, self.k_norm(self.k_proj(x))[:, :, None], positions, segments, leaf)
        return Asked(q, self.weights_proj(x) * (self.width * self.n_heads) ** -0.5, k[:, :, 0])


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
    topk: int

    @abstractmethod
    def look(self, q: Tensor, held: Held, index: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (b t h k) over the tokens (b t 1 n): outputs (b t h v), and the weights of each token (b t 1 n)."""

    def place(self, position: Position | None) -> None:
        super().place(position)
        self.causal_only, self.takes = True, ()

    def add_indexer(self, config: IndexedConfig, ctx: BuildContext, d_source: int, rotated: int) -> None:
        """To be called once the base is built."""
        refuse_spans(self.position, "position", ctx)
        self.indexer, self.topk = Indexer(config, ctx.child("indexer"), d_source, rotated), config.index_topk
        position = self.indexer.position
        if isinstance(position, QueryKeyPosition):
            broken: dict[Law, str] = dict(position.cannot)
            self.cannot, self.uses_max_len = {**self.cannot, **broken}, self.uses_max_len or position.uses_max_len

    def index_shapes(self) -> dict[str, tuple[int, ...]]:
        """What is held of a token for the indexer: a mixer's ``held_shapes`` adds it to its base's."""
        return {"index_k": (self.indexer.width,)}

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0, edges: Edges | None = None,
    ) -> tuple[Any, ...]:
        leaf = state if isinstance(state, Growing) else None
        x, positions = self.enter(x, segments, state, leaf)
        q, new, gate, source = self.project(x, positions, segments, leaf)
        source = x if source is None else source
        asked = self.indexer(x.detach(), source.detach(), positions, segments, leaf)
        held = hold(leaf, {**new, "index_k": asked.key}, segments, keep=keep)
        keys = held.data["index_k"]
        index = choose_tokens(asked.q, asked.weights, keys, held.places, self.topk)
        y, mass = self.look(q, held, index[:, :, None])
        scores = index_scores(asked.q, asked.weights, keys, index, held.places)
        loss = _kl(scores, mass[:, :, 0], index, held.places)
        count = n_real((x.shape[0], x.shape[1]), segments, x.device)
        return self.leave(y, gate), held.leaf, Extras(losses={LOSS: (loss, count)})


def _kl(scores: Tensor, mass: Tensor, index: Tensor, places: Places) -> Tensor:
    """Sum over queries of KL(p || softmax of the scores), p the attention's weights (b t n) on its choices, summing to 1."""
    seen = (index >= 0) & (places.count > 0)[..., None]
    p = mass / mass.sum(-1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
    alone = ~seen.any(-1, keepdim=True)
    log = scores.masked_fill(~seen, -torch.inf).masked_fill(alone, 0.0).log_softmax(-1).masked_fill(~seen, 0.0)
    return (torch.xlogy(p, p) - p * log).sum()
