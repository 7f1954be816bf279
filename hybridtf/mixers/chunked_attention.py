"""``chunked_attention``: causal attention inside chunks, the local layers of Llama 4.

    token p sees j <= p with floor(j / attention_chunk_size) = floor(p / attention_chunk_size)

with rotary positions and, after them, a norm of queries and keys without weight. Chunks count from the document's start, and
are to the op what documents are.
Source: https://github.com/meta-llama/llama-models/blob/main/models/llama4/model.py. The scaling of queries by position belongs
to that model's layers without positions and is not part of this mixer.

Axes: b batch, t time, s held tokens, d d_model, h heads, g key heads, k head_dim.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from hybridtf.core import BuildContext, Component, Growing, NormConfig, PositionConfig, Ring
from hybridtf.nn import HeadsConfig, HeadsMixer, RopeConfig
from hybridtf.nn.softmax_mixer import Pair

_LONGEST = 2**31
"""Chunks of a document, and no document has as many."""


def _rope() -> PositionConfig:
    return RopeConfig(theta=500000.0, interleaved=True)


class ChunkedAttentionConfig(HeadsConfig):
    """Llama 4's local attention, which never crosses the border of a chunk."""

    type: Literal["chunked_attention"] = "chunked_attention"
    source: ClassVar[str] = "https://github.com/meta-llama/llama-models/blob/main/models/llama4/model.py"
    attention_chunk_size: int = Field(default=8192, gt=0)
    position: Component[PositionConfig] = Field(default_factory=_rope)
    """Told on queries and keys, on scores, or nowhere (``none``)."""
    qk_norm: Component[NormConfig] | None = None
    """A norm of each head's queries and keys, after positions (Llama 4: ``rms_norm`` with ``weight = false``)."""
    qkv_bias: bool = False
    out_bias: bool = False

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=4, n_kv_heads=2, head_dim=6, attention_chunk_size=4)

    def build(self, ctx: BuildContext) -> ChunkedAttention:
        return ChunkedAttention(self, ctx)


class ChunkedAttention(HeadsMixer):
    """See :class:`ChunkedAttentionConfig`. Its state is a ``Ring`` of the last attention_chunk_size keys and values,
    which hold the running chunk."""

    def __init__(self, config: ChunkedAttentionConfig, ctx: BuildContext) -> None:
        self.window = config.attention_chunk_size
        super().__init__(
            config, ctx, qkv_bias=config.qkv_bias, out_bias=config.out_bias, qk_norm=config.qk_norm, qk_norm_after=True
        )
        self.config = config
        self.takes = ()  # a prefix would be seen both ways, and ends in no chunk

    def in_sight(self, after: Growing | Ring, length: int) -> int | None:
        size = self.config.attention_chunk_size
        return (length - 1) % size + 1 if after.capacity == size else None

    def apart(self, q: Tensor, ids: Pair | None, pos: Pair | None) -> tuple[Pair | None, Pair | None]:
        size, (b, t) = self.config.attention_chunk_size, q.shape[:2]
        if ids is None or pos is None:
            if t <= size:
                return ids, pos
            chunk = torch.arange(t, device=q.device).div(size, rounding_mode="floor").add(1).expand(b, t)
            return (chunk, chunk), pos
        of_queries, of_keys = (
            torch.where(z > 0, z * _LONGEST + at.div(size, rounding_mode="floor"), z) for z, at in zip(ids, pos, strict=True)
        )
        return (of_queries, of_keys), pos
