"""``parallel``: channel mixers side by side on one input, their outputs added up (Gemma 4: a dense unit beside experts).

    y = sum_i norm_i(channel_mixer_i(in_norm_i(x)))

Axes: b batch, t time, d d_model.

Held to transformers' Gemma 4 (tests/interop/test_oracles.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor, nn

from hybridtf.core import (
    BuildContext,
    ChannelMixer,
    ChannelMixerConfig,
    Component,
    Edges,
    EdgeSpec,
    Extras,
    Law,
    NormConfig,
    Segments,
    State,
    active,
    check_call,
)


class ParallelChannelMixersConfig(ChannelMixerConfig):
    """Channel mixers side by side on one input, their outputs added up, with norms of each branch where they are given."""

    type: Literal["parallel"] = "parallel"

    branches: tuple[Component[ChannelMixerConfig], ...] = Field(min_length=2)
    in_norms: tuple[Component[NormConfig], ...] | None = Field(
        default=None, examples=[({"type": "rms_norm"}, {"type": "none"})]
    )
    """Of the input of each branch, one for each (``none``: as it comes). None: no branch has one."""
    norm: Component[NormConfig] | None = Field(default=None, examples=[{"type": "rms_norm"}])
    """Of each branch's output, each with weights of its own."""

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        if self.in_norms is not None and len(self.in_norms) != len(self.branches):
            raise ValueError(f"in_norms has {len(self.in_norms)} norms for {len(self.branches)} branches")
        return self

    @classmethod
    def tiny(cls) -> Self:
        mixers: Any = active()["channel_mixers"]
        return cls(branches=(mixers.get("glu").tiny(), mixers.get("moe").tiny()))

    def build(self, ctx: BuildContext) -> ParallelChannelMixers:
        return ParallelChannelMixers(self, ctx)


class ParallelChannelMixers(ChannelMixer):
    """See :class:`ParallelChannelMixersConfig`. Its state is a tuple of the branches'."""

    def __init__(self, config: ParallelChannelMixersConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.branches = nn.ModuleList(one.build(ctx.child(f"branches[{i}]")) for i, one in enumerate(config.branches))
        self.in_norms, self.norms = nn.ModuleList(), nn.ModuleList()
        for i, norm in enumerate(config.in_norms or ()):
            self.in_norms.append(norm.build(ctx.child(f"in_norms[{i}]")))
        if config.norm is not None:
            self.norms.extend(config.norm.build(ctx.child("norm")) for _ in config.branches)
        parts = self._parts()
        self.reads = tuple(dict.fromkeys(edge for part in parts for edge in part.reads))
        self.losses = tuple(dict.fromkeys(loss for part in parts for loss in part.losses))
        self.writes = tuple(edge for part in parts for edge in part.writes)
        if len(set(self.writes)) < len(self.writes):
            raise ctx.error(f"two of its branches write one edge: {self.writes}")
        self.takes = tuple(name for name in parts[0].takes if all(name in part.takes for part in parts))
        self.uses_max_len = any(part.uses_max_len for part in parts)
        self.cannot: dict[Law, str] = {law: why for part in parts for law, why in part.cannot.items()}
        self.losses_cannot: dict[Law, str] = {law: why for part in parts for law, why in part.losses_cannot.items()}

    def _parts(self) -> list[ChannelMixer]:
        return list(self.branches)  # type: ignore[arg-type]

    def edge_specs(self) -> Mapping[str, EdgeSpec]:
        return {name: spec for part in self._parts() for name, spec in part.edge_specs().items()}

    def unread(self, edges: frozenset[str]) -> None:
        for part in self._parts():
            part.unread(edges.intersection(part.writes))
        self.writes = tuple(edge for part in self._parts() for edge in part.writes)

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return tuple(part.init_state(batch_size, max_len) for part in self._parts())

    def forward(
        self, x: Tensor, *, segments: Segments | None = None, state: State | None = None, keep: int = 0,
        edges: Edges | None = None,
    ) -> tuple[Any, ...]:
        """x (b t d) to y (b t d), the state after it, and what the branches return beside."""
        check_call(self, x, segments, state)
        written: dict[str, Tensor] = {}
        losses: dict[str, tuple[Tensor, Tensor]] = {}
        y, states = None, []
        for i, part in enumerate(self._parts()):
            given = self.in_norms[i](x) if self.in_norms else x
            more: dict[str, Any] = {"edges": {edge: (edges or {})[edge] for edge in part.reads}} if part.reads else {}
            z, after, *extras = part(given, segments=segments, state=None if state is None else state[i], keep=keep, **more)
            z = self.norms[i](z) if self.norms else z
            y = z if y is None else y + z
            states.append(after)
            for found in extras:
                written.update(found.edges)
                for name, (total, count) in found.losses.items():
                    before = losses.get(name)
                    losses[name] = (total, count) if before is None else (before[0] + total, before[1] + count)
        out = (y, None if state is None else tuple(states))
        return (*out, Extras(written, losses)) if self.extra_results() else out
