"""Attention residuals in a loop whose passes send messages to the next (transformers ``inkling2_loop``).

A loop is a repeated group of shared blocks: ``a*6 (b c d)*3 e*6``. With these blocks every pass starts again from what went
into the first, the stream and the sums of groups before it; what a pass made, its sums p_0, p_1, ..., the last one being its
final stream, is told to the next:

    m = mix over (p_0, .., p_n)            a learned query of each layer for each input, as in attention residuals
    h' = (1 - f) h + g m                   f, g gates of each channel made from h and m, see hybridtf/nn/message_gate.py

for the inputs of the mixer (queries, keys and values apart, where it takes them apart) and of the channel mixer, before their
norms. The first pass has no messages. Whole models equal transformers' (tests/blocks/test_inkling2_loop.py).
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field
from torch import Tensor

from hybridtf.blocks.attention_residual import AttentionResidual, GroupsConfig
from hybridtf.core import BlockOutput, BuildContext, Context, Edges, EdgeSpec, Segments, State
from hybridtf.nn import DepthAttention, MessageGate, group_sum, group_sums


class LoopedResidualConfig(GroupsConfig):
    """A layer of a loop with messages between passes. Its first layer has ``first``, is shared and begins a group.

    A loop needs a layer before it, and is not part of a loop of its own.
    """

    type: Literal["looped_attention_residual"] = "looped_attention_residual"
    loop: str = Field(default="loop", pattern=r"^[a-z][a-z0-9_]*$")
    """The name of the loop: edges of its passes begin with it."""
    first: bool = False
    """Each visit of this layer begins a pass."""
    gate_rank: int = Field(default=64, gt=0)
    """Width in which the gates of messages are made."""
    gate_eps: float = Field(default=1e-6, gt=0)
    """Of the norms before them."""

    @classmethod
    def tiny(cls) -> Self:
        return super().tiny().model_copy(update={"gate_rank": 3})

    def build(self, ctx: BuildContext) -> LoopedResidual:
        return LoopedResidual(self, ctx)


def start_of(loop: str) -> str:
    """The edge that holds what went into a loop."""
    return f"{loop}_start"


def told_by(loop: str, i: int) -> str:
    """The edge of the ``i``-th sum of the pass before."""
    return f"{loop}_told_{i}"


class LoopedResidual(AttentionResidual):
    """See :class:`LoopedResidualConfig`. Beside the mixes there are ``mixer_message``, ``mixer_gate`` and so on."""

    def __init__(self, config: LoopedResidualConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.d_model = ctx.d_model
        self.loop, self.first, self.n_before = config.loop, config.first, len(self.reads)
        start = start_of(config.loop)
        if config.first:
            self._check_first(config, ctx)
            self.writes = (start, *self.writes)
            self.reads_again = (start, group_sum(self.n_before), group_sum(self.n_before + 1))
        else:
            self.reads = (*self.reads, start)
            self.reads_again = (told_by(config.loop, 0), told_by(config.loop, 1))
        for branch in self.parts():
            for site in self.sites(branch):
                message, gate = f"{site}_message", f"{site}_gate"
                self.add_module(message, DepthAttention(config.depth, ctx.child(message)))
                self.add_module(gate, MessageGate(ctx.child(gate), config.gate_rank, config.gate_eps))

    def _check_first(self, config: LoopedResidualConfig, ctx: BuildContext) -> None:
        if start_of(config.loop) in ctx.edges:
            raise ctx.error(f"the loop {config.loop!r} has begun before: give its first layer shared = true, or another name")
        if not self.begins_group:
            raise ctx.error(
                f"a loop begins with a group, and layer {ctx.layer_idx} is inside one: group_size = {config.group_size}"
            )

    def edge_specs(self) -> dict[str, EdgeSpec]:
        told = (told_by(self.loop, i) for i in range(2))
        names = {*self.reads, *self.writes, *self.reads_again, start_of(self.loop), *told}
        return {**super().edge_specs(), **dict.fromkeys(names, EdgeSpec((self.d_model,)))}

    def sums_before(self, ctx: BuildContext) -> tuple[str, ...]:
        return super().sums_before(ctx) or (group_sum(0),)

    def told(self, site: str, h: Tensor, edges: Edges) -> Tensor:
        sums = self._told_sums(edges)
        if not sums:
            return h
        message = getattr(self, f"{site}_message")(sums)
        gated: Tensor = getattr(self, f"{site}_gate")(h, message)
        return gated

    def _told_sums(self, edges: Edges) -> list[Tensor]:
        sums: list[Tensor] = []
        while (name := told_by(self.loop, len(sums))) in edges:
            sums.append(edges[name])
        return sums

    def forward(
        self, x: Tensor, edges: Edges, *, segments: Segments | None = None, state: State | None = None,
        context: Context | None = None, keep: int = 0,
    ) -> BlockOutput:
        if self.first:
            x, edges = self._begun(x, edges)
        return super().forward(x, edges, segments=segments, state=state, context=context, keep=keep)

    def _begun(self, x: Tensor, edges: Edges) -> tuple[Tensor, Edges]:
        """The stream and the edges that a pass begins with: at the first visit those given, then again those."""
        start, now = start_of(self.loop), dict(edges)
        if start not in now:
            return x, {**now, start: x}
        # The first sum of a pass is the stream that it began with, which tells nothing.
        made = [now.pop(name) for name in group_sums(now)[self.n_before :]][1:]
        for i, sum_of_group in enumerate([*made, x]):
            now[told_by(self.loop, i)] = sum_of_group
        return now[start], now
