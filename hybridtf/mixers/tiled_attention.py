"""FlashAttention to be read (https://arxiv.org/abs/2205.14135): the function of ``attention`` by tiles of queries and keys, an
online softmax, and weights that are made again in the backward.

    y_t = out( sum_s softmax_s(q_t . k_s / sqrt(k)) v_s ),   s <= t in t's document

The algorithm is ``hybridtf/ops/attention/tiled.py``, about a hundred lines of plain torch. To train, take ``attention``.

Axes: b batch, t time, s keys, d d_model, h heads, k head_dim.

Held to torch's scaled_dot_product_attention.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from hybridtf.core import BuildContext
from hybridtf.nn import HeadsConfig, HeadsMixer


class TiledAttentionConfig(HeadsConfig):
    """Softmax attention by the readable form of FlashAttention, to be read and not to train with."""

    type: Literal["tiled_attention"] = "tiled_attention"
    source: ClassVar[str] = "https://arxiv.org/abs/2205.14135"
    time_exponent: ClassVar[float] = 2.0

    kernel: str = "tiled"

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=4, n_kv_heads=2, head_dim=4)

    def build(self, ctx: BuildContext) -> TiledAttention:
        return TiledAttention(self, ctx)


class TiledAttention(HeadsMixer):
    """See :class:`TiledAttentionConfig`. Its state is a ``Growing`` of keys and values."""

    def __init__(self, config: TiledAttentionConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx, sites=("qk",))
        self.config = config
