"""``dilated``: a window with gaps.

    y_p = out_proj(concat_h sum_j softmax_j(q_p . k_j / sqrt(head_dim)) v_j),
    j = p, p - r, ..., p - (w - 1) r (before the document's start: fewer)

with w = ``window`` and r = ``dilation``; in a stack that looks both ways also j = p + r, ..., p + (w - 1) r. A stack of layers
with growing r sees far at the cost of its windows alone. The pattern is the dilated sliding window of Longformer (Beltagy et
al. 2020, https://arxiv.org/abs/2004.05150, section 3.1). Positions count from the document's start.

Axes: b batch, t time, d d_model, h heads, g key heads, k head_dim.

Held to the sliding window of transformers over every r-th token, under torch's attention, and to a dense mask.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field

from hybridtf.core import BuildContext
from hybridtf.nn import SparseMixer, SparseMixerConfig
from hybridtf.ops.block_sparse_attention import SparseRule


class DilatedConfig(SparseMixerConfig):
    """Sliding window attention to every ``dilation``-th token."""

    type: Literal["dilated"] = "dilated"
    source: ClassVar[str] = "https://arxiv.org/abs/2004.05150"
    window: int = Field(default=256, gt=0)
    """Tokens that a token sees to one side, itself included."""
    dilation: int = Field(default=2, gt=0)
    """Steps from one seen token to the next."""

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=4, n_kv_heads=2, head_dim=6, window=3)

    def build(self, ctx: BuildContext) -> Dilated:
        return Dilated(self, ctx)


class Dilated(SparseMixer):
    """See :class:`DilatedConfig`. Its state is a ``Ring`` of the last (window - 1) * dilation + 1 keys and values."""

    def __init__(self, config: DilatedConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.reach = (config.window - 1) * config.dilation + 1
        self.rule = SparseRule(causal=ctx.causal, window=config.window, dilation=config.dilation)
