"""``longformer``: a window to both sides and global tokens, which see all and are seen by all.

    a plain token:   softmax over the window |p - j| <= attention_window / 2 and the global tokens, with q, k, v
    a global token:  softmax over its whole document, with its own projections q_global, k_global, v_global

Beltagy et al. 2020, https://arxiv.org/abs/2004.05150. Global are the first ``n_global`` tokens of each document and those
that ``Segments.global_tokens`` names. Positions are the stem's business (learned, in the paper).

The causal variant is ours: every view is clipped to the past, so that a global token sees only what came before it, and is
seen only by what comes after.

Axes: b batch, t time, d d_model, h heads, g key heads, k head_dim.

The form that looks both ways is held to transformers, the causal one to DeepSpeed's layout under torch's attention.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from hybridtf.core import BuildContext, Component, Growing, PositionConfig, Ring, Segments
from hybridtf.nn import NoPositionConfig, SparseMixer, SparseMixerConfig
from hybridtf.ops.block_sparse_attention import Held, SparseRule


class LongformerConfig(SparseMixerConfig):
    """Longformer: sliding window attention with global tokens, which see all and are seen by all."""

    type: Literal["longformer"] = "longformer"
    source: ClassVar[str] = "https://arxiv.org/abs/2004.05150"
    attention_window: int = Field(default=512, gt=0)
    """Tokens of the window besides the token itself, half of them to each side: even."""
    n_global: int = Field(default=1, ge=0, examples=[3])
    """Leading tokens of each document that are global (a classifier's first token)."""
    position: Component[PositionConfig] = Field(default_factory=NoPositionConfig)
    """Told on queries and keys, or nowhere (``none``)."""
    qkv_bias: bool = True

    @field_validator("attention_window")
    @classmethod
    def _even(cls, window: int) -> int:
        if window % 2:
            raise ValueError(f"attention_window = {window} must be even: half of it lies on each side")
        return window

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=4, n_kv_heads=2, head_dim=6, attention_window=4, n_global=2)

    def build(self, ctx: BuildContext) -> Longformer:
        return Longformer(self, ctx)


class Longformer(SparseMixer):
    """See :class:`LongformerConfig`. Its state is a ``Growing`` of both kinds of keys and values and of who is global, since
    a later global token looks at all of them; a plain token reads its window and the global tokens alone."""

    takes: tuple[str, ...] = ("global_tokens",)

    def __init__(self, config: LongformerConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.n_global = config.n_global
        inner, kv = self.heads * self.head_dim, self.n_kv_heads * self.head_dim
        self.q_global = nn.Linear(ctx.d_model, inner, bias=config.qkv_bias, **ctx.factory)
        self.k_global = nn.Linear(ctx.d_model, kv, bias=config.qkv_bias, **ctx.factory)
        self.v_global = nn.Linear(ctx.d_model, kv, bias=config.qkv_bias, **ctx.factory)
        self.rule = SparseRule(causal=ctx.causal, window=config.attention_window // 2 + 1)
        self.whole = SparseRule(causal=ctx.causal, stride=1)

    def extra_shapes(self) -> dict[str, tuple[int, ...]]:
        return {**dict.fromkeys(("k_global", "v_global"), (self.n_kv_heads, self.head_dim)), "marked": ()}

    def project(
        self, x: Tensor, positions: Tensor, segments: Segments | None, leaf: Growing | Ring | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As of the base; the queries of both kinds side by side, (b t 2h k)."""
        q, new = super().project(x, positions, segments, leaf)
        far, keys, values = (self.split(proj(x)) for proj in (self.q_global, self.k_global, self.v_global))
        far, keys = self.placed(far, keys, positions, segments, leaf)
        marked = self._global(positions, segments).to(x.dtype)
        return torch.cat([q, far], 2), {**new, "k_global": keys, "v_global": values, "marked": marked}

    def _global(self, positions: Tensor, segments: Segments | None) -> Tensor:
        """(b t) bool"""
        marked = positions < self.n_global
        if segments is None:
            return marked
        if segments.global_tokens is not None:
            marked = marked | segments.global_tokens
        return marked & segments.real

    def attend(self, q: Tensor, held: Held, segments: Segments | None) -> Tensor:
        marked = self._global(held.places.position, segments)
        plain, far = q.chunk(2, dim=2)
        places = held.places
        near = self.seen(plain, held, self.rule, places=places.only(~marked), marked=held.data["marked"] > 0.5)
        whole = self.seen(far, held, self.whole, places=places.only(marked), k="k_global", v="v_global")
        return torch.where(marked[..., None, None], whole, near)
