"""The base of mixers that are made of other mixers: what they ask for, cannot do and return, put together.

Axes: b batch, t time, d d_model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hybridtf.core.config import BuildContext
from hybridtf.core.contracts import Context, Edges, EdgeSpec, Extras, Law, SequenceMixer
from hybridtf.core.errors import ConfigError
from hybridtf.core.segments import Segments
from hybridtf.core.states import State


class Gathered:
    """What the parts of one call leave behind: edges, losses and states by part."""

    def __init__(self, edges: Edges | None) -> None:
        self.given: Edges = edges or {}
        self.edges: dict[str, Tensor] = {}
        self.losses: dict[str, tuple[Tensor, Tensor]] = {}
        self.state: dict[str, State] = {}


class Combinator(SequenceMixer):
    """A mixer with other mixers inside. A subclass makes them, hands them to :meth:`adopt`, and calls them by :meth:`run`.

    Its state is a dict of theirs, by name.
    """

    def adopt(self, parts: Mapping[str, SequenceMixer], where: str = "") -> None:
        """Take mixers as children of these names, with what they ask of their user.

        Raises :class:`ConfigError` where two of them write one edge, or say different things of one.
        """
        self.names = tuple(parts)
        for name, part in parts.items():
            self.add_module(name, part)
        mixers = list(parts.values())
        self.reads = _union(part.reads for part in mixers)
        self.losses = _union(part.losses for part in mixers)
        self.writes = tuple(edge for part in mixers for edge in part.writes)
        for edge in self.writes:
            if self.writes.count(edge) > 1:
                raise ConfigError(f"{where}: two of its mixers write the edge {edge!r}")
        for edge, spec in self.edge_specs().items():
            for other in (part.edge_specs().get(edge, spec) for part in mixers):
                if other != spec:
                    raise ConfigError(f"{where}: of its mixers one has the edge {edge!r} as {other}, another as {spec}")
        self.takes = tuple(name for name in mixers[0].takes if all(name in part.takes for part in mixers))
        self.uses_max_len = any(part.uses_max_len for part in mixers)
        self.causal_only = any(part.causal_only for part in mixers)
        self.needs_context = any(part.needs_context for part in mixers)
        self.cannot: dict[Law, str] = {law: why for part in mixers for law, why in part.cannot.items()}
        self.losses_cannot: dict[Law, str] = {law: why for part in mixers for law, why in part.losses_cannot.items()}

    def refuse_edges(self, name: str, ctx: BuildContext, *, context: bool) -> None:
        """Raises :class:`ConfigError` where a part has edges, or needs a context and ``context`` is false: the combinator
        ``name`` gives its parts another sequence than the stack's."""
        if self.reads or self.writes or (self.needs_context and not context):
            asked = [*self.reads, *self.writes] or "a context"
            what = "edges" if context else "edges or a context"
            raise ctx.error(f"{name!r} holds mixers of one sequence, and not one with {what}: {asked}")
    def edge_specs(self) -> Mapping[str, EdgeSpec]:
        return {name: spec for part in self.parts().values() for name, spec in part.edge_specs().items()}

    def unread(self, edges: frozenset[str]) -> None:
        parts = self.parts().values()
        for part in parts:
            part.unread(edges.intersection(part.writes))
        self.writes = tuple(edge for part in parts for edge in part.writes)

    def stands(self, given: Mapping[str, EdgeSpec]) -> None:
        for part in self.parts().values():
            part.stands(given)

    def parts(self) -> dict[str, SequenceMixer]:
        """The mixers inside, by name."""
        return {name: self.get_submodule(name) for name in self.names}  # type: ignore[misc]

    def init_state(self, batch_size: int, max_len: int | None = None) -> State:
        return {name: part.init_state(batch_size, max_len) for name, part in self.parts().items()}

    def run(
        self, name: str, x: Tensor, seen: Gathered, *, segments: Segments | None, state: State | None,
        context: Context | None = None, keep: int = 0,
    ) -> Tensor:
        """y (b t d) of the part ``name`` on its own ``state``; what else it returns goes to ``seen``."""
        part = self.parts()[name]
        options: dict[str, Any] = {"segments": segments, "state": state, "context": context, "keep": keep}
        if part.reads:
            options["edges"] = {edge: seen.given[edge] for edge in part.reads}
        y, seen.state[name], *more = part(x, **options)
        extras: Extras = more[0] if more else Extras()
        seen.edges.update(extras.edges)
        for loss, (total, count) in extras.losses.items():
            before = seen.losses.get(loss)
            seen.losses[loss] = (total, count) if before is None else (before[0] + total, before[1] + count)
        out: Tensor = y
        return out

    def result(self, y: Tensor, seen: Gathered, state: State | None) -> tuple[Any, ...]:
        """What ``forward`` returns."""
        after = None if state is None else seen.state
        return (y, after, Extras(seen.edges, seen.losses)) if self.extra_results() else (y, after)


def _union(groups: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for group in groups for name in group))
