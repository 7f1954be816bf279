"""The base of mixers whose queries attend to the tokens that a lightning indexer chooses (``indexer.py`` has what it computes).

    C_t  = the ``index_top_k`` tokens of highest score, up to t in its document
    y_t  = softmax attention of t to C_t;   loss: KL( p_t || softmax_{C_t} I_t ),  p_t the attention's own weights over heads

With ``index_pool`` whole blocks are scored and chosen, and the tokens after the last complete block are always seen.

A choice is of positions in the query's document, so that it means the same in every layer. One that others share is the edge
``indexer_choice`` (b t n).

Axes: b batch, t time, s held tokens, d d_model, n choices, m chosen blocks, j blocks that end in a call, l index_pool, h heads.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from hybridtf.core import (
    BuildContext,
    ConfigError,
    Context,
    Edges,
    EdgeSpec,
    Extras,
    Law,
    Position,
    QueryKeyPosition,
    Ring,
    Segments,
    State,
)
from hybridtf.nn.counts import n_real
from hybridtf.nn.indexer import Asked, IndexedConfig, Indexer, refuse_spans
from hybridtf.nn.pooled import empty_pooled, ended, entries_seen, pooled_with
from hybridtf.nn.softmax_mixer import SoftmaxMixer
from hybridtf.ops.block_sparse_attention import Held, hold
from hybridtf.ops.gather_attention import choose_tokens, index_scores

LOSS = "indexer_kl"
CHOICE = "indexer_choice"
"""The edge by which a layer's choice reaches later ones."""


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


class IndexedMixer(SoftmaxMixer):
    """Put before a base that projects (``HeadsMixer``, ``LatentMixer``): its state then holds the indexer's keys too, unless
    it reads the choice of another layer.

    The indexer sees x and the queries' source without their graph, and learns from its loss alone.
    """

    op = "gather_attention"
    losses: tuple[str, ...] = (LOSS,)
    indexer: Indexer | None
    top_k: int
    n_choices: int

    @abstractmethod
    def look(self, q: Tensor, held: Held, index: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (b t h k) over the tokens (b t 1 n): outputs (b t h v), and the weights of each token (b t 1 n)."""

    def place(self, position: Position | None, *, looks_back: bool = True) -> None:
        super().place(position, looks_back=looks_back)

    def add_indexer(self, config: IndexedConfig, ctx: BuildContext, d_source: int, rotated: int) -> None:
        """To be called once the base is built."""
        refuse_spans(self.position, "position", ctx)
        self.indexer, self.top_k, self.n_choices = None, config.index_top_k, config.n_choices
        if config.index_choice == "read":
            self.reads, self.losses = (CHOICE,), ()
            return
        self.writes = (CHOICE,) if config.index_choice == "write" else ()
        self.indexer = Indexer(config, ctx.child("indexer"), d_source, rotated)
        position = self.indexer.position
        if isinstance(position, QueryKeyPosition):
            broken: dict[Law, str] = dict(position.cannot)
            self.cannot, self.uses_max_len = {**self.cannot, **broken}, self.uses_max_len or position.uses_max_len

    def edge_specs(self) -> dict[str, EdgeSpec]:
        n = self.n_choices
        spec = EdgeSpec((n,), torch.int64, lambda generator, b, t: random_choice(generator, b, t, n))
        return {CHOICE: spec} if self.reads or self.writes else {}

    def index_shapes(self) -> dict[str, tuple[int, ...]]:
        """What is held of a token beside the attention's own: a mixer's ``held_shapes`` adds it to its base's."""
        return {} if self.indexer is None or self.indexer.pool > 1 else self.indexer.held_shapes()

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        keys, indexer = super().init_state(batch_size, max_len), self.indexer
        if indexer is None or indexer.pool == 1:
            return keys
        where: dict[str, Any] = {"dtype": self.attention.compute_dtype, "device": self.attention.device}
        shapes, pool = indexer.held_shapes(), indexer.pool
        pooled = empty_pooled(batch_size, {"index_k": shapes["index_k"]}, pool, max_len, **where)
        return {"keys": keys, "open": Ring.empty(batch_size, shapes, window=pool, max_len=max_len, **where), "pooled": pooled}

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0, edges: Edges | None = None,
    ) -> tuple[Any, ...]:
        leaves: dict[str, Any] = state if isinstance(state, dict) else {"keys": state}
        leaf, indexer = leaves["keys"], self.indexer
        x, positions = self.enter(x, segments, state, leaf)
        q, new, gate, source = self.project(x, positions, segments, leaf)
        if indexer is None:
            held = hold(leaf, new, segments, keep=keep)
            if edges is None or CHOICE not in edges:
                raise ConfigError(f"index_choice = 'read' needs edges={{{CHOICE!r}: ...}}, the choice of an earlier layer")
            y, _ = self.look(q, held, edges[CHOICE][:, :, None])
            return self.leave(y, gate), held.leaf
        source = x if source is None else source
        asked = indexer(x.detach(), source.detach(), positions, segments, leaf)
        by_token = indexer.pool == 1
        held = hold(leaf, {**new, **(asked.held if by_token else {})}, segments, keep=keep)
        choice = self._tokens(asked, held) if by_token else self._blocks(indexer, asked, held, leaves, segments, keep)
        y, mass = self.look(q, held, choice.tokens[:, :, None])
        m = choice.ids.shape[2]
        of_block = mass[:, :, 0, : m * indexer.pool].unflatten(-1, (m, indexer.pool)).sum(-1)
        loss = indexer_kl(choice.scores, of_block, choice.ids)
        count = n_real((x.shape[0], x.shape[1]), segments, x.device)
        after = {"keys": held.leaf, **choice.leaves} if choice.leaves and state is not None else held.leaf
        # A set: in the order of positions, as the order of equal scores may depend on how the input is cut.
        written = {CHOICE: choice.tokens.sort(-1).values} if self.writes else {}
        return self.leave(y, gate), after, Extras(written, {LOSS: (loss, count)})

    def _tokens(self, asked: Asked, held: Held) -> Choice:
        keys = held.data["index_k"]
        ids = choose_tokens(asked.q, asked.weights, keys, held.places, self.top_k)
        return Choice(ids, ids, index_scores(asked.q, asked.weights, keys, ids, held.places), {})

    def _blocks(
        self, indexer: Indexer, asked: Asked, held: Held, leaves: dict[str, Any], segments: Segments | None, keep: int
    ) -> Choice:
        """Complete blocks that score highest, and the tokens after the last of them."""
        pool, places = indexer.pool, held.places
        tokens = hold(leaves.get("open"), asked.held, segments, keep=keep)
        ends = ended(tokens, pool, pool)
        entries = indexer.of_blocks(tokens, ends, segments, leaves["keys"])
        pooled = pooled_with(leaves.get("pooled"), {"index_k": entries}, ends, segments)
        keys, where = pooled.data["index_k"], entries_seen(pooled.first, ends, places, pool, pool)
        ids = choose_tokens(asked.q, asked.weights, keys, where, self.top_k // pool)
        steps = torch.arange(pool, device=ids.device)
        chosen = torch.where(ids[..., None] < 0, -1, ids[..., None] * pool + steps).flatten(2)
        tail = ends.done[..., None] * pool + steps[:-1]  # what is later than the query is not seen
        scores = index_scores(asked.q, asked.weights, keys, ids, where)
        return Choice(torch.cat([chosen, tail], -1), ids, scores, {"open": tokens.leaf, "pooled": pooled.leaf})


def random_choice(generator: Generator, b: int, t: int, n: int) -> Tensor:
    """(b t n) int64: for each token ``n`` of ``t`` positions, no two the same; -1 for those that are not there."""
    order = torch.rand(b, t, t, generator=generator).argsort(-1)[..., :n]
    return torch.cat([order, order.new_full((b, t, max(n - t, 0)), -1)], -1)


def indexer_kl(scores: Tensor, mass: Tensor, ids: Tensor) -> Tensor:
    """Sum over queries of KL(p || softmax of the scores), p the attention's weights (b t n) on its choices, summing to 1."""
    seen = ids >= 0
    p = mass / mass.sum(-1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
    alone = ~seen.any(-1, keepdim=True)
    log = scores.masked_fill(~seen, -torch.inf).masked_fill(alone, 0.0).log_softmax(-1).masked_fill(~seen, 0.0)
    return (torch.xlogy(p, p) - p * log).sum()
