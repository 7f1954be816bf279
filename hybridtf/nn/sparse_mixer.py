"""What attention mixers with a sparse view share: projections to heads, positions, the tokens they hold, the way out.

Axes: b batch, t time, d d_model, s keys in reach, h query heads, g key heads, k head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridtf.core import (
    BuildContext,
    Context,
    Growing,
    Law,
    Position,
    PositionConfig,
    QueryKeyPosition,
    Ring,
    Segments,
    State,
    StateError,
    check_call,
)
from hybridtf.nn.head_projections import HeadProjections
from hybridtf.nn.heads_mixer import HeadsConfig
from hybridtf.nn.positions import token_positions, told
from hybridtf.ops.block_sparse_attention import Held, SparseRule, hold


class SparseMixerConfig(HeadsConfig):
    """Options of every mixer that attends to chosen tokens of those it holds."""

    qkv_bias: bool = False
    out_bias: bool = False


class SparseMixer(HeadProjections):
    """A mixer sets its ``rule``, or gives an :meth:`attend` of its own, and sets ``reach`` where it sees no further back than
    so many tokens.

    Its state is a ``Growing`` of keys and values, or with ``reach`` a ``Ring``; a subclass may hold more, see :meth:`project`
    and :meth:`extra_shapes`.
    """

    causal_only = False
    rule: SparseRule
    reach: int | None = None
    """Tokens that a query sees back, itself included. None: all."""

    def __init__(self, config: SparseMixerConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx, qkv_bias=config.qkv_bias, out_bias=config.out_bias)
        self.config = config
        self.position = _placed(config.position, ctx.child("position", d_model=self.head_dim))
        self.cannot: dict[Law, str] = {} if self.position is None else dict(self.position.cannot)
        if isinstance(self.position, QueryKeyPosition):
            self.causal_only, self.uses_max_len = self.position.causal_only, self.position.uses_max_len
        features = set() if ctx.causal else {"non_causal"}
        self.attention = ctx.bind_kernel(
            "block_sparse_attention", config.kernel, sizes=self.kernel_sizes(), features=features
        )

    # -- for a subclass ----------------------------------------------------------------------------------------------

    def attend(self, q: Tensor, held: Held, segments: Segments | None) -> Tensor:
        """(b t h k): what the queries read from what is held."""
        return self.seen(q, held, self.rule)

    def extra_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a token's further tensors to hold, by name."""
        return {}

    def project(
        self, x: Tensor, positions: Tensor, segments: Segments | None, leaf: Growing | Ring | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Queries (b t h k), and what to hold of the call's tokens, (b t ...) by name."""
        q, k, v = (self.split(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.placed(q, k, positions, segments, leaf)
        return q, {"k": k, "v": v}

    def placed(
        self, q: Tensor, k: Tensor, positions: Tensor, segments: Segments | None, leaf: Growing | Ring | None
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys with their positions told."""
        return told(self.position, q, k, positions, segments, leaf)

    # -- the mixer ---------------------------------------------------------------------------------------------------

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        if not self.causal:
            return ()
        shapes = {**self.held_shapes(), **self.extra_shapes()}
        where: dict[str, Any] = {"dtype": self.attention.compute_dtype, "device": self.attention.device}
        if self.reach is not None:
            return Ring.empty(batch_size, shapes, window=self.reach, max_len=max_len, **where)
        return Growing.empty(batch_size, shapes, max_len=max_len, **where)

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, context: Context | None = None,
        keep: int = 0,
    ) -> tuple[Tensor, State | None]:
        if not self.causal and state is not None:
            raise StateError("attention that looks both ways has no state: give it whole documents")
        leaf = state if isinstance(state, Growing | Ring) else None
        q, held = self.projected(x, segments, leaf, keep)
        return self.out_proj(self.attend(q, held, segments).flatten(-2)), held.leaf

    def projected(
        self, x: Tensor, segments: Segments | None, leaf: Growing | Ring | None, keep: int
    ) -> tuple[Tensor, Held]:
        """Queries (b t h k) of x, and what they may look at."""
        check_call(self, x, segments, leaf)
        if segments is not None:
            # Weights are 0 at pads, but 0 times what lies there must be 0 too.
            x = x.masked_fill(~segments.real[..., None], 0)
        positions = token_positions(x, segments, leaf)
        q, new = self.project(x, positions, segments, leaf)
        return q, hold(leaf, new, segments, keep=keep)

    def seen(self, q: Tensor, held: Held, *args: Any, k: str = "k", v: str = "v", **options: Any) -> Tensor:
        """The op's answer for these queries over the held ``k`` and ``v``; the places are ``held``'s unless given."""
        places = options.pop("places", held.places)
        y: Tensor = self.attention(
            q, held.data[k].to(q.dtype), held.data[v].to(q.dtype), places, *args, n_tokens=q.shape[1], **options
        )
        return y


def _placed(config: PositionConfig, ctx: BuildContext) -> Position | None:
    position = config.build_at(ctx, "qk")
    if isinstance(position, QueryKeyPosition) and any(position.span(d) for d in (torch.float32, torch.float64)):
        raise ctx.error(f"{config.type_name()!r} is told as scores are taken, a span of queries at a time; use another here")
    return position
