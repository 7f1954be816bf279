"""The composer: named blocks and a pattern become a stack of layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hybridtf.core import (
    Block,
    BlockConfig,
    BlockOutput,
    BuildContext,
    ConfigError,
    Context,
    Edges,
    EdgeSpec,
    Losses,
    Segments,
    SequenceMixer,
    State,
    check_call,
    known_names,
)
from hybridtf.models.merges import MergeTable, agreed_stream, build_merge, build_spread
from hybridtf.models.pattern import print_pattern
from hybridtf.models.spreads import ProjectedSpreadConfig
from hybridtf.models.visits import Visit
from hybridtf.nn.positions import shared_tables


def add_losses(first: Losses, second: Losses) -> dict[str, tuple[Tensor, Tensor]]:
    """Losses of two components together: sums and counts of one name add up."""
    losses = dict(first)
    for name, (total, count) in second.items():
        before = losses.get(name)
        losses[name] = (total, count) if before is None else (before[0] + total, before[1] + count)
    return losses


class Stack(nn.Module):
    """Layers in order. ``layers`` holds each set of weights once; ``order`` names the one each layer visits.

    State is per visit, weights per name: a shared block (``layers.shared_NAME``) is visited by many layers. What a layer
    adds to it of its own stands under the layer's number (``layers.3.adapters...``).

    It takes and returns (b t d). Where its blocks work on several streams, each starts as what came in, or as ``spread`` makes
    it, and ``merge`` makes one tensor of what they end with.
    """

    def __init__(
        self, layers: tuple[str, ...], blocks: Mapping[str, BlockConfig], ctx: BuildContext, *, edges: tuple[str, ...] = (),
        merge: MergeTable | None = None, spread: ProjectedSpreadConfig | None = None,
    ) -> None:
        super().__init__()
        self.layer_names = layers
        self.layers = nn.ModuleDict()
        order = []
        written = set(edges)
        for i, name in enumerate(layers):
            key = f"shared_{name}" if blocks[name].shared else str(i)
            if key not in self.layers:
                n_visits = layers.count(name) if blocks[name].shared else 1
                where = ctx.child(
                    f"blocks.{name}", layer_idx=i, n_layers=len(layers), edges=frozenset(written), n_visits=n_visits
                )
                block: Block = blocks[name].build(where)
                self.layers[key] = block
                written.update(block.writes, *(part.writes for part in block.parts().values()))
            order.append(key)
            adapters = blocks[name].adapters
            if adapters is not None:
                where = ctx.child(f"blocks.{name}.adapters", layer_idx=i, n_layers=len(layers))
                if not blocks[name].shared:
                    raise where.error("adapters tell the layers of a shared block apart: they need shared = true")
                self.layers[str(i)] = Visit(adapters, self.layers[key], where)
        self.order = tuple(order)
        self.stream = agreed_stream(layers, self.blocks(), ctx.where)
        self.spread = build_spread(spread, self.stream, ctx.child("spread"))
        self.merge = build_merge(merge, self.stream, ctx.child("merge", edges=frozenset(written)))
        parts = [part for block in self.blocks() for part in block.parts().values()]
        self.read = {edge for part in parts for edge in part.reads} | {edge for one in self.blocks() for edge in one.reads}
        """Edges that some component reads."""
        for part in parts:
            part.unread(frozenset(part.writes) - self.read)
        self._stand()
        self.takes = {field for block in self.blocks() for part in block.parts().values() for field in part.takes}
        """Fields of segments that some component obeys."""
        self.checkpointed: frozenset[int] = frozenset()
        """Layers whose activations are recomputed in the backward pass."""

    def _stand(self) -> None:
        """Tells each mixer how that looks which it reads, layer by layer."""
        given: dict[str, EdgeSpec] = {}
        for block in self.blocks():
            for part in block.parts().values():
                if isinstance(part, SequenceMixer):
                    part.stands(given)
                given.update({edge: spec for edge, spec in part.edge_specs().items() if edge in part.writes})

    def blocks(self) -> list[Block]:
        """The block of each layer, in order; a shared one comes once a visit."""
        return [self.layers[key] for key in self.order]  # type: ignore[misc]

    def adapters(self) -> list[Visit | None]:
        """What each layer adds of its own to a shared block."""
        own = dict(self.layers.items())
        return [part if isinstance(part := own.get(str(i)), Visit) else None for i in range(len(self.order))]

    def visit(self, i: int) -> Callable[..., BlockOutput]:
        """What layer ``i`` calls: its block, with the layer's own adapters in place."""
        block = self.layers[self.order[i]]
        own = str(i)
        return functools.partial(self.layers[own], block) if own != self.order[i] and own in self.layers else block

    def run_layer(
        self, i: int, x: Tensor, edges: Edges, *, segments: Segments | None = None, state: State | None = None,
        context: Context | None = None, keep: int = 0,
    ) -> BlockOutput:
        """Layer ``i`` by itself, computed again in the backward pass where it is one of ``checkpointed``."""
        options: dict[str, Any] = {"segments": segments, "state": state, "context": context, "keep": keep}
        if i in self.checkpointed and state is None and torch.is_grad_enabled():
            again: BlockOutput = checkpoint(self.visit(i), x, edges, use_reentrant=False, **options)
            return again
        return self.visit(i)(x, edges, **options)

    def init_state(self, batch_size: int, max_len: int | None = None) -> tuple[State, ...]:
        return tuple(block.init_state(batch_size, max_len) for block in self.blocks())

    def forward(
        self, x: Tensor, edges: Edges, *, segments: Segments | None = None, state: tuple[State, ...] | None = None,
        context: Context | None = None, keep: int = 0,
    ) -> BlockOutput:
        check_call(self, x, segments, state)
        self._check(segments)
        losses: dict[str, tuple[Tensor, Tensor]] = {}
        states: list[State] = []
        seen = dict(edges)
        if self.spread is not None:
            x = self.spread(x)
        elif self.stream.n_streams > 1:
            x = x.unsqueeze(-2).expand(*x.shape[:-1], self.stream.n_streams, -1)
        with shared_tables():
            for i in range(len(self.order)):
                own = None if state is None else state[i]
                out = self.run_layer(i, x, seen, segments=segments, state=own, context=context, keep=keep)
                x, seen = out.x, out.edges
                states.append(out.state)
                losses = add_losses(losses, out.losses) if out.losses else losses
        if self.merge is not None:
            x = self.merge(x, seen)
        return BlockOutput(x, seen, losses, None if state is None else tuple(states))

    def _check(self, segments: Segments | None) -> None:
        if segments is None:
            return
        given = {"prefix_len": segments.prefix_len, "global_tokens": segments.global_tokens, "axes": segments.axes or None}
        for name, value in given.items():
            if value is not None and name not in self.takes:
                raise ConfigError(f"segments.{name} is given, and no component of this stack obeys it")


def build_stack(
    layers: tuple[str, ...], blocks: Mapping[str, BlockConfig], ctx: BuildContext, *, edges: tuple[str, ...] = (),
    specs: Mapping[str, EdgeSpec] = MappingProxyType({}), context: bool = False, merge: MergeTable | None = None,
    spread: ProjectedSpreadConfig | None = None,
) -> Stack:
    """Build the layers and check what crosses them: every edge that a component reads needs an earlier writer.

    ``specs``: how some of ``edges`` look. ``context``: the model hands one to its layers. ``merge``, ``spread``: how several
    streams become one, and how they start. Raises :class:`ConfigError`, naming the layer, for a block that no layer uses, an
    edge that nobody wrote, a component that needs a context where there is none, and blocks that do not agree on what the
    residual stream is.
    """
    unused = sorted(set(blocks) - set(layers))
    if unused:
        raise ctx.error(
            f"block {unused[0]!r} is used by no layer of the pattern {print_pattern(layers)!r}; use it or take it out"
        )
    stack = Stack(layers, blocks, ctx, edges=edges, merge=merge, spread=spread)
    written: dict[str, EdgeSpec | None] = {edge: specs.get(edge) for edge in edges}
    for i, (name, block) in enumerate(zip(layers, stack.blocks(), strict=True)):
        here = f"{ctx.where}.blocks.{name}"
        for part_name, part in block.parts().items():
            if getattr(part, "needs_context", False) and not context:
                raise ConfigError(f"{here}.{part_name}: layer {i} looks at a context, and this model has none to give")
        check_layer(block, here, i, written)
    return stack


def check_layer(block: Block, where: str, layer: int, written: dict[str, EdgeSpec | None]) -> None:
    """Raise :class:`ConfigError` for an edge that a layer reads and nobody has ``written``, or not so; adds its own to it."""
    _check_reads(block, where, layer, written)
    for name, part in block.parts().items():
        _check_reads(part, f"{where}.{name}", layer, written, block.gives)
        written.update(said_of_written(part))
    written.update(said_of_written(block))


def said_of_written(part: Any) -> dict[str, EdgeSpec | None]:
    """The edges that a component writes, and how they look where it says so."""
    said = part.edge_specs()
    return {edge: said.get(edge) for edge in part.writes}


def _check_reads(
    part: Any, where: str, layer: int, written: Mapping[str, EdgeSpec | None], given_by_block: tuple[str, ...] = ()
) -> None:
    said = part.edge_specs()
    for edge in part.reads:
        if edge in given_by_block:
            continue
        if edge not in written:
            raise ConfigError(
                f"{where}: layer {layer} reads the edge {edge!r}, which no earlier component writes. "
                f"{known_names(edge, written)}"
            )
        wanted, given = said.get(edge), written[edge]
        if wanted is not None and given is not None and wanted != given:
            raise ConfigError(
                f"{where}: layer {layer} reads the edge {edge!r} as {wanted}, and the last one to write it has it as {given}"
            )
        if given is not None and given.reach is not None and (wanted is None or wanted.reach is None):
            raise ConfigError(
                f"{where}: layer {layer} reads the edge {edge!r} of the call's tokens, and the last one to write it hands on "
                "all that it holds: the reader must be told (SequenceMixer.stands) and say so (EdgeSpec.reach)"
            )
