"""Attention residuals: a branch reads a learned mix of what earlier groups of layers gave (https://arxiv.org/abs/2603.15031).

Layers come in groups. The stream x is the sum of what the present group has added; the sums of the groups before it,
s_0 (the stem's output), s_1, ..., are edges.

    h = mix over (s_0, .., s_n, x)         a learned query for each branch, see hybridtf/nn/depth_attention.py
    y = f(norm(h))
    x' = x + y                             in the first branch of a group: x becomes s_{n+1}, and x' = y

The first branch of the stack has no mix and reads x itself. The model ends with a mix of its own (``merge``).

A mixer that takes inputs of their own for keys and values (``separate_inputs``) gets them here: the same as its queries, or
mixes and norms of their own (``key_value_mixes``, Inkling 2's full attention).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from hybridtf.blocks.options import BRANCHES, NormsBefore
from hybridtf.blocks.wiring import BranchResult, Wiring
from hybridtf.core import BuildContext, Edges
from hybridtf.nn import KEY_INPUT, VALUE_INPUT, DepthAttention, DepthOptions, group_sum, group_sums

OWN_INPUTS: Mapping[str, str] = {"key": KEY_INPUT, "value": VALUE_INPUT}
"""Sites of a mixer beside its own: how the names of their parts begin, and the edge that each is handed as."""


class GroupsConfig(NormsBefore):
    """Options of wirings over groups of layers."""

    group_size: int = Field(default=3, gt=0)
    """Layers of a group: 1 keeps the output of every layer apart; the paper has 3 of two branches, Inkling 2 has 6."""
    depth: DepthOptions = Field(default_factory=DepthOptions)
    """How sources are mixed."""
    key_value_mixes: bool = False
    """Keys and values have a mix and a norm of their own (the norm as ``mixer_norm``), for a mixer with ``separate_inputs``."""


class AttentionResidualConfig(GroupsConfig):
    """Attention residuals over groups of layers. All layers of a stack have this wiring, with one ``group_size``.

    A shared block begins a group at every visit, where its first one does; it cannot be the first layer, which has a mix less.
    """

    type: Literal["attention_residual"] = "attention_residual"

    def build(self, ctx: BuildContext) -> AttentionResidual:
        return AttentionResidual(self, ctx)


class AttentionResidual(Wiring):
    """See :class:`AttentionResidualConfig`. The mixes are ``mixer_depth``, ``key_depth`` and so on."""

    partial_sums = True

    def __init__(self, config: GroupsConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.reads = self.sums_before(ctx)
        self.begins_group = ctx.layer_idx % config.group_size == 0
        self.writes = (group_sum(len(self.reads)),) if self.begins_group else ()
        asked = () if self.mixer is None else self.mixer.reads
        self.gives = tuple(edge for edge in OWN_INPUTS.values() if edge in asked)
        if config.key_value_mixes and not self.gives:
            raise ctx.error("key_value_mixes is for a mixer that takes inputs of keys and values apart (separate_inputs)")
        if config.shared and not self.reads:
            raise ctx.error("the first layer has a mix less than later visits need: put another before the shared block")
        for i, branch in enumerate(self.parts()):
            for site in self.sites(branch):
                if (self.reads or i) and self.own(site) == site:
                    self.add_module(f"{site}_depth", DepthAttention(config.depth, ctx.child(f"{site}_depth")))
                if site in OWN_INPUTS and config.key_value_mixes:
                    self.add_module(f"{site}_norm", (config.mixer_norm or config.norm).build(ctx.child(f"{site}_norm")))

    def sums_before(self, ctx: BuildContext) -> tuple[str, ...]:
        """The sums of earlier groups that there are at the first visit."""
        return group_sums(ctx.edges)

    def sites(self, branch: str) -> tuple[str, ...]:
        """What a branch reads: its own input, then those of its keys and values where it takes them apart."""
        return (BRANCHES[branch], *(OWN_INPUTS if branch == "mixer" and self.gives else ()))

    def own(self, site: str) -> str:
        """The site whose mix and norm this one has."""
        apart = site not in OWN_INPUTS or self.config.key_value_mixes  # type: ignore[attr-defined]
        return site if apart else "mixer"

    def told(self, site: str, h: Tensor, edges: Edges) -> Tensor:
        """What a site reads, h (b t d), before its norm: a subclass has more to say."""
        return h

    def inputs(self, branch: str, before: Sequence[Tensor], x: Tensor, edges: Edges) -> dict[str, Tensor]:
        """What a branch reads at each of its sites, mixed over the sums ``before`` and x, and normed."""
        mixes: dict[str, Tensor] = {}
        found: dict[str, Tensor] = {}
        for site in self.sites(branch):
            own = self.own(site)
            if own not in mixes:
                depth: DepthAttention | None = getattr(self, f"{own}_depth", None)
                mixes[own] = x if depth is None else depth([*before, x])
            found[site] = self._norm(f"{own}_norm", self.told(site, mixes[own], edges))
        return found

    def wired(self, x: Tensor, seen: BranchResult, call: dict[str, Any]) -> Tensor:
        for i, branch in enumerate(self.parts()):
            before = [seen.edges[name] for name in group_sums(seen.edges)]
            found = self.inputs(branch, before, x, seen.edges)
            given = {edge: found[site] for site, edge in OWN_INPUTS.items() if site in found}
            y = self.scaled(branch, self.branch(branch, found[BRANCHES[branch]], seen, given=given, **call))
            if i == 0 and self.begins_group:
                seen.edges[group_sum(len(before))] = x
                x = y.to(x.dtype)
            else:
                x = self.onto(branch, x, y)
        return x
