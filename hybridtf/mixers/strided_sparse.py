"""``strided_sparse``: the two factorised patterns of the Sparse Transformer.

    strided:  token p sees j = p - stride, ..., p and every j with (p - j) mod stride = 0
    fixed:    token p sees its own block of ``stride`` tokens and the last ``n_summary`` tokens of every block

in one softmax over both sets (the paper's merged heads; its heads of one set each are not here). Child et al. 2019,
https://arxiv.org/abs/1904.10509, section 4.2. The time of a sequence of length t is t * stride + t^2 / stride (fixed:
t^2 * n_summary / stride), so t^1.5 where the stride is chosen near sqrt(t), as the paper does. Blocks and positions count from
the document's start.

Axes: b batch, t time, d d_model, h heads, g key heads, k head_dim.

The fixed pattern is held to DeepSpeed's layout under torch's attention. No outside reference was run of the strided one: it is
held to the paper's sets, written as dense masks.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from hybridtf.core import BuildContext
from hybridtf.nn import SparseMixer, SparseMixerConfig, idle_beside
from hybridtf.ops.block_sparse_attention import SparseRule


class StridedSparseConfig(SparseMixerConfig):
    """The Sparse Transformer's attention: to the near tokens and to a fixed selection of the far ones."""

    type: Literal["strided_sparse"] = "strided_sparse"
    source: ClassVar[str] = "https://arxiv.org/abs/1904.10509"
    time_exponent: ClassVar[float] = 2.0
    pattern: Literal["strided", "fixed"] = "strided"
    stride: int = Field(default=128, gt=0)
    """The paper's l: the step of the strided pattern, the block of the fixed one."""
    n_summary: int = Field(default=8, gt=0)
    """The paper's c, of the fixed pattern alone: closing tokens of a block that all later tokens see."""

    _without_summary = idle_beside({"pattern": "strided"}, "n_summary")

    @model_validator(mode="after")
    def _summary_fits(self) -> Self:
        if self.pattern == "fixed" and self.n_summary > self.stride:
            raise ValueError(f"n_summary = {self.n_summary} is more than the block of stride = {self.stride} tokens")
        return self

    @classmethod
    def tiny(cls) -> Self:
        return cls(n_heads=4, n_kv_heads=2, head_dim=6, stride=3)

    def build(self, ctx: BuildContext) -> StridedSparse:
        return StridedSparse(self, ctx)


class StridedSparse(SparseMixer):
    """See :class:`StridedSparseConfig`. Its state is a ``Growing`` of keys and values; decoding reads only what is seen."""

    def __init__(self, config: StridedSparseConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        if config.pattern == "strided":
            self.rule = SparseRule(causal=ctx.causal, window=config.stride + 1, stride=config.stride)
        else:
            self.rule = SparseRule(block=config.stride, causal=ctx.causal, near=1, summary=config.n_summary)
