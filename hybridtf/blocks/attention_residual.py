"""Attention residuals: a branch reads a learned mix of what earlier groups of layers gave (https://arxiv.org/abs/2603.15031).

Layers come in groups. The stream x is the sum of what the present group has added; the sums of the groups before it,
s_0 (the stem's output), s_1, ..., are edges.

    h = mix over (s_0, .., s_n, x)         a learned query for each branch, see hybridtf/nn/depth_attention.py
    y = f(norm(h))
    x' = x + y                             in the first branch of a group: x becomes s_{n+1}, and x' = y

The first branch of the stack has no mix and reads x itself. The model ends with a mix of its own (``merge``). Inkling 2's
full attention has a mix for each of queries, keys and values; here a branch reads one.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from hybridtf.blocks.options import BRANCHES, NormsBefore
from hybridtf.blocks.wiring import BranchResult, Wiring
from hybridtf.core import BuildContext
from hybridtf.nn import DepthAttention, DepthOptions, group_sum, group_sums


class AttentionResidualConfig(NormsBefore):
    """Attention residuals over groups of layers. All layers of a stack have this wiring, with one ``group_size``.

    A shared block begins a group at every visit, where its first one does; it cannot be the first layer, which has a mix less.
    """

    type: Literal["attention_residual"] = "attention_residual"
    group_size: int = Field(default=3, gt=0)
    """Layers of a group: 1 keeps the output of every layer apart; the paper has 3 of two branches, Inkling 2 has 6."""
    depth: DepthOptions = Field(default_factory=DepthOptions)
    """How sources are mixed."""

    def build(self, ctx: BuildContext) -> AttentionResidual:
        return AttentionResidual(self, ctx)


class AttentionResidual(Wiring):
    """See :class:`AttentionResidualConfig`. The mixes are ``mixer_depth`` and ``channel_depth``."""

    partial_sums = True

    def __init__(self, config: AttentionResidualConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.reads = group_sums(ctx.edges)
        self.begins_group = ctx.layer_idx % config.group_size == 0
        self.writes = (group_sum(len(self.reads)),) if self.begins_group else ()
        if config.shared and not self.reads:
            raise ctx.error("the first layer has a mix less than later visits need: put another before the shared block")
        for i, branch in enumerate(self.parts()):
            if self.reads or i:
                name = f"{BRANCHES[branch]}_depth"
                self.add_module(name, DepthAttention(config.depth, ctx.child(name)))

    def wired(self, x: Tensor, seen: BranchResult, call: dict[str, Any]) -> Tensor:
        for i, branch in enumerate(self.parts()):
            before = [seen.edges[name] for name in group_sums(seen.edges)]
            depth: DepthAttention | None = getattr(self, f"{BRANCHES[branch]}_depth", None)
            h = x if depth is None else depth([*before, x])
            y = self.scaled(branch, self.branch(branch, self.norm(branch, h), seen, **call))
            if i == 0 and self.begins_group:
                seen.edges[group_sum(len(before))] = x
                x = y.to(x.dtype)
            else:
                x = self.onto(branch, x, y)
        return x
