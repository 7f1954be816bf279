"""One face for all kinds of component, so that each law is written once.

Axes: b batch, t time, s context time, d d_model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridtf.core import (
    BiasPosition,
    Block,
    BuildContext,
    ComponentConfig,
    Context,
    EdgeSpec,
    QueryKeyPosition,
    Segments,
    State,
    StateLeaf,
    leaves,
)
from hybridtf.core.contracts import Extras
from hybridtf.testing.errors import ContractError, NotApplicableError

VOCAB = 23
MAX_LEN = 64
ROOM = 24
"""``max_len`` of a state, where its form is asked for."""
F64 = torch.float64

TIMELESS = ("norms", "positions")
"""Kinds that treat each token alone and have no state."""


class Outcome(NamedTuple):
    """What a call returned, whatever the kind."""

    y: Tensor
    state: State
    edges: Mapping[str, Tensor] = {}
    losses: Mapping[str, tuple[Tensor, Tensor]] = {}


@dataclass(frozen=True)
class Inputs:
    """x (b t d), over several streams (b t s d), or ids (b t), with the edges beside it and the context it looks at."""

    x: Tensor
    edges: dict[str, Tensor] = field(default_factory=dict)
    context: Context | None = None

    def columns(self, part: Any) -> Inputs:
        """Columns ``part`` (slice or index), with the same context."""
        return replace(self, x=self.x[:, part], edges={k: v[:, part] for k, v in self.edges.items()})

    def rows(self, index: Any) -> Inputs:
        """Rows ``index`` (slice or index)."""
        context = self.context
        if context is not None:
            segments = None if context.segments is None else context.segments.rows(index)
            context = Context(context.x[index], segments)
        return Inputs(self.x[index], {k: v[index] for k, v in self.edges.items()}, context)

    def later(self) -> Inputs:
        """For a call whose state already holds the context."""
        return replace(self, context=None)

    def watched(self) -> Inputs:
        """The same values as leaves of a new graph."""
        def leaf(t: Tensor) -> Tensor:
            return t.detach().clone().requires_grad_() if t.is_floating_point() else t

        context = None if self.context is None else Context(leaf(self.context.x), self.context.segments)
        return Inputs(leaf(self.x), {k: leaf(v) for k, v in self.edges.items()}, context)

    def watching(self) -> list[Tensor]:
        """The tensors that gradients are asked for."""
        found = [self.x, *self.edges.values(), *([] if self.context is None else [self.context.x])]
        return [t for t in found if t.requires_grad]

    def to(self, dtype: torch.dtype) -> Inputs:
        """Floating values in ``dtype``."""
        def cast(t: Tensor) -> Tensor:
            return t.to(dtype) if t.is_floating_point() else t

        context = None if self.context is None else Context(cast(self.context.x), self.context.segments)
        return Inputs(cast(self.x), {k: cast(v) for k, v in self.edges.items()}, context)


@dataclass(frozen=True)
class Subject:
    """A component under test: how to build it, feed it and call it."""

    kind: str
    config: ComponentConfig
    d_model: int = 16
    seed: int = 0
    with_losses: bool = True
    """What a call returns has its losses; without, a law is checked of the outputs alone."""

    # -- building ----------------------------------------------------------------------------------------------------

    def context(self, **changes: Any) -> BuildContext:
        """What the component is told of its model."""
        base: dict[str, Any] = {"max_seq_len": MAX_LEN, "param_dtype": F64, "seed": self.seed, "where": self.name}
        base["vocab_size"] = getattr(self.config, "vocab_size", None) or VOCAB
        base["causal"] = not self.looks_ahead
        return BuildContext(d_model=self.d_model, **{**base, **changes})

    @property
    def looks_ahead(self) -> bool:
        """The component is for stacks that are not causal only."""
        return bool(getattr(self.config, "looks_ahead", False))

    @property
    def name(self) -> str:
        return type(self.config).type_name()

    def build_plain(self, **changes: Any) -> nn.Module:
        """The component as its config builds it (float64 unless said otherwise)."""
        ctx = self.context(**changes)
        build: Any = self.config.build
        module = build(ctx, VOCAB) if self.kind in ("stems", "heads") else build(ctx)
        if module is None:
            raise NotApplicableError("builds no module")
        if not isinstance(module, nn.Module):
            raise ContractError(f"build(ctx) must return an nn.Module, not {type(module).__name__}")
        return module

    def _tied_weight(self, x: Tensor) -> Tensor:
        """What a stem would hand to a tied head, in the dtype and on the device of ``x``."""
        return torch.arange(VOCAB * self.d_model).view(VOCAB, -1).mul(0.7).sin().to(x)

    def build(self, dtype: torch.dtype = F64, **changes: Any) -> nn.Module:
        """The component in eval mode (no dropout), every parameter nudged so that zero and one starts hide nothing."""
        module = self.build_plain(param_dtype=dtype, **changes).eval()
        generator = torch.Generator().manual_seed(77)
        with torch.no_grad():
            for param in module.parameters():
                if not param.is_meta:
                    param.add_((0.1 * torch.randn(param.shape, generator=generator)).to(param))
        return module

    # -- feeding -----------------------------------------------------------------------------------------------------

    @property
    def takes_ids(self) -> bool:
        """The input is token ids (b t)."""
        return self.kind in ("stems", "models")

    def reads(self, module: nn.Module) -> tuple[str, ...]:
        """Edges that must be given."""
        if isinstance(module, Block):
            written = set(module.gives)
            needed = [*module.reads, *module.reads_again]
            for part in module.parts().values():
                needed += [name for name in part.reads if name not in written]
                written |= set(part.writes)
            return tuple(dict.fromkeys(needed))
        return tuple(getattr(module, "reads", ()))

    def needs_context(self, module: nn.Module) -> bool:
        """The component, or a part of it, looks at a context."""
        return any(getattr(part, "needs_context", False) for part in module.modules())

    def inputs(self, module: nn.Module, b: int, t: int, *, salt: int = 0, dtype: torch.dtype = F64) -> Inputs:
        """Random input, the same for the same sizes and salt."""
        generator = torch.Generator().manual_seed(self.seed * 1009 + salt)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=F64).to(dtype)

        if self.takes_ids:
            vocab = int(getattr(self.config, "vocab_size", VOCAB))
            return Inputs(torch.randint(0, vocab, (b, t), generator=generator))
        if self.kind == "positions":
            shapes = {"qk": (2, self.d_model), "bias": (6,), "input": (self.d_model,)}
            return Inputs(randn(b, t, *shapes[str(module.site)]), {"positions": torch.arange(t).expand(b, t)})
        edges = {}
        for name, spec in self._edge_specs(module).items():
            drawn = randn(b, t, *spec.shape) if spec.draw is None else spec.draw(generator, b, t)
            edges[name] = _as_told(name, drawn, spec)
        streams = getattr(module, "n_streams", 1)
        x = randn(b, t, *((streams,) if streams > 1 else ()), self.d_model)
        context = None
        if self.needs_context(module):
            context = Context(randn(b, 5, self.d_model), None)
        return Inputs(x, edges, context)

    def _edge_specs(self, module: nn.Module) -> dict[str, EdgeSpec]:
        known = {"token_ids": _IDS, "embedding": EdgeSpec((self.d_model,)), **edge_specs(module)}
        for name in self.reads(module):
            if name not in known:
                raise ContractError(f"reads the edge {name!r}, and does not say in edge_specs() how it looks")
            if known[name].dtype is not None and known[name].draw is None:
                raise ContractError(f"edge_specs(): the edge {name!r} of {known[name].dtype} needs an example, draw")
        return {name: known[name] for name in self.reads(module)}

    # -- calling -----------------------------------------------------------------------------------------------------

    def init_state(self, module: Any, b: int, max_len: int | None = None) -> State:
        return () if self.kind in TIMELESS else module.init_state(b, max_len)

    def call(
        self, module: Any, inputs: Inputs, *, segments: Segments | None = None, state: State | None = None,
        keep: int = 0,
    ) -> Outcome:
        """One call; checks the form of what comes back."""
        if self.kind in TIMELESS:
            return Outcome(_timeless(module, inputs.x, *inputs.edges.values()), state)
        given: dict[str, Any] = {"segments": segments, "state": state, "keep": keep}
        if inputs.context is not None:
            given["context"] = inputs.context
        if self.kind == "blocks":
            out = module(inputs.x, inputs.edges, **given)
            new = {name: edge for name, edge in out.edges.items() if name not in inputs.edges}
            outcome = Outcome(out.x, out.state, new, out.losses)
        elif self.kind == "models":
            out = module(inputs.x, **given)
            outcome = Outcome(out.logits, out.state, {}, out.losses)
        else:
            if self.reads(module):
                given["edges"] = inputs.edges
            if getattr(module, "needs_tied_weight", False):
                given["tied"] = self._tied_weight(inputs.x)
            outcome = _unpack(module, module(inputs.x, **given))
        if state is None and outcome.state is not None:
            raise ContractError("returns a state although none was given: the second value must then be None")
        if state is not None and outcome.state is None:
            raise ContractError("returns no state although one was given")
        return outcome if self.with_losses else outcome._replace(losses={})


def _timeless(module: nn.Module, x: Tensor, *positions: Tensor) -> Tensor:
    """A norm of x, or x with its positions told."""
    if isinstance(module, QueryKeyPosition):
        y: Tensor = module(x, module.table(positions[0], x.dtype))
    elif isinstance(module, BiasPosition):  # x as the scores (b t h) of key 0
        y = x - (module(x.shape[-1], x.device) * positions[0][..., None]).to(x.dtype)
    else:
        y = module(x, *positions)
    return y


def max_len_counts(module: nn.Module) -> bool:
    """The component, or a part of it, says that it depends on the ``max_len`` of its state."""
    return any(getattr(part, "uses_max_len", False) for part in module.modules())


def max_len_shows(subject: Subject, module: nn.Module) -> bool:
    """A state made with ``max_len`` is of another form than one made without, or the component says that it counts. Calls on
    others go the same way with and without it."""
    forms = [[_form(leaf) for leaf in leaves(subject.init_state(module, 1, max_len))] for max_len in (None, ROOM)]
    return max_len_counts(module) or forms[0] != forms[1]


def _form(leaf: StateLeaf) -> tuple[Any, ...]:
    return type(leaf), getattr(leaf, "static", None), *leaf.tensors(), *((x.shape, x.dtype) for x in leaf.every_tensor())


def _drawn_ids(generator: torch.Generator, b: int, t: int) -> Tensor:
    return torch.randint(0, VOCAB, (b, t), generator=generator)


_IDS = EdgeSpec((), torch.int64, _drawn_ids)


def edge_specs(module: Any) -> dict[str, EdgeSpec]:
    """What a component, and the parts of a block, say of the edges that they read or write."""
    parts = module.parts().values() if isinstance(module, Block) else ()
    return {name: spec for part in (*parts, module) if hasattr(part, "edge_specs") for name, spec in part.edge_specs().items()}


def _as_told(name: str, edge: Tensor, spec: EdgeSpec) -> Tensor:
    """The edge, if it looks as its component says."""
    right = edge.is_floating_point() if spec.dtype is None else edge.dtype == spec.dtype
    if tuple(edge.shape[2:]) != spec.shape or not right:
        raise ContractError(f"edge_specs(): the edge {name!r} is said to be {spec}, and is {edge.dtype} {tuple(edge.shape)}")
    return edge


def _unpack(module: Any, out: Any) -> Outcome:
    wants = 3 if getattr(module, "extra_results", bool)() else 2
    if not isinstance(out, tuple) or len(out) != wants:
        got = f"{len(out)} values" if isinstance(out, tuple) else type(out).__name__
        extra = ", Extras(edges, losses)" if wants == 3 else ""
        raise ContractError(f"forward must return (y, state{extra}), got {got}")
    extras = out[2] if wants == 3 else Extras()
    for said, given, word in ((module.writes, extras.edges, "writes"), (module.losses, extras.losses, "losses")):
        if set(said) != set(given):
            raise ContractError(f"declares {word} = {sorted(said)} but returns {sorted(given)}")
    for name, spec in edge_specs(module).items():
        if name in extras.edges:
            _as_told(name, extras.edges[name], spec)
    return Outcome(out[0], out[1], extras.edges, extras.losses)


def needs_state(subject: Subject, module: nn.Module) -> None:
    """Skip a check about states for a component that has none."""
    if not leaves(subject.init_state(module, 1)):
        raise NotApplicableError("has no state")


def by_phase(subject: Subject, module: nn.Module, inputs: Inputs) -> list[tuple[str, Tensor]]:
    """Outputs of training (where there are gradients, its backward runs too), prefill and three steps of decode, by name."""
    y = subject.call(module, inputs).y
    if y.requires_grad:
        y.float().square().sum().backward()
    results = [("training output", y.detach())]
    if subject.kind in TIMELESS:
        return results
    t = inputs.x.shape[1]
    with torch.no_grad():
        state = subject.init_state(module, inputs.x.shape[0], t + 5)
        out = subject.call(module, inputs.columns(slice(0, t - 3)), state=state)
        results.append(("prefill", out.y))
        for i in range(t - 3, t):
            out = subject.call(module, inputs.later().columns(slice(i, i + 1)), state=out.state)
            results.append((f"decode step {i}", out.y))
    return results
