"""``chunked_attention``: causal attention inside chunks, the local layers of Llama 4.

    token p sees j <= p with floor(j / attention_chunk_size) = floor(p / attention_chunk_size)

with rotary positions and, after them, a norm of queries and keys without weight. Chunks count from the document's start.
Source: https://github.com/meta-llama/llama-models/blob/main/models/llama4/model.py. The scaling of queries by position belongs
to that model's layers without positions and is not part of this mixer.

Axes: b batch, t time, d d_model, h heads, g key heads, k head_dim.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor

from hybridtf.core import BuildContext, Component, Growing, NormConfig, PositionConfig, Ring, Segments
from hybridtf.nn import RopeConfig, SparseMixer, SparseMixerConfig
from hybridtf.ops.block_sparse_attention import SparseRule


def _rope() -> PositionConfig:
    return RopeConfig(theta=500000.0, interleaved=True)


class ChunkedAttentionConfig(SparseMixerConfig):
    """Llama 4's local attention, which never crosses the border of a chunk."""

    type: Literal["chunked_attention"] = "chunked_attention"
    source: ClassVar[str] = "https://github.com/meta-llama/llama-models/blob/main/models/llama4/model.py"
    attention_chunk_size: int = Field(default=8192, gt=0)
    position: Component[PositionConfig] = Field(default_factory=_rope)
    """Told on queries and keys, or nowhere (``none``)."""
    qk_norm: Component[NormConfig] | None = None
    """A norm of each head's queries and keys, after positions (Llama 4: ``rms_norm`` with ``weight = false``)."""

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=4, n_kv_heads=2, head_dim=6, attention_chunk_size=4)

    def build(self, ctx: BuildContext) -> ChunkedAttention:
        return ChunkedAttention(self, ctx)


class ChunkedAttention(SparseMixer):
    """See :class:`ChunkedAttentionConfig`. Its state is a ``Ring`` of the last attention_chunk_size keys and values,
    which hold the running chunk."""

    def __init__(self, config: ChunkedAttentionConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.reach = config.attention_chunk_size
        self.rule = SparseRule(block=config.attention_chunk_size, causal=ctx.causal, near=1)
        head = ctx.child("qk_norm", d_model=self.head_dim)
        self.q_norm = None if config.qk_norm is None else config.qk_norm.build(head)
        self.k_norm = None if config.qk_norm is None else config.qk_norm.build(head)

    def placed(
        self, q: Tensor, k: Tensor, positions: Tensor, segments: Segments | None, leaf: Growing | Ring | None
    ) -> tuple[Tensor, Tensor]:
        q, k = super().placed(q, k, positions, segments, leaf)
        return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))
