"""An op over time out of one function of a span: memory linear in the length, gradients of the first order, one operator
for a compiler.

An op's author writes what happens in a span of tokens, as plain differentiable torch: ``span(call, state) -> (y, state)``.
:func:`span_op` walks the spans in order, keeps only the state before each, and for the gradients computes each span again and
lets autograd differentiate that one, last span first. Both passes are custom operators, so that a compiler
sees one call each, whatever the length.

Axes: b batch, t time, l places of a span.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.gradients import autograd_inside, count_flops, first_order

States: TypeAlias = tuple[Tensor, ...]

# Elements of the largest tensor of a span: what a CPU's cache holds, and enough to fill a GPU.
SPAN_BUDGET = 2**18
SPAN_BUDGET_GPU = 2**24


@dataclass(frozen=True)
class Masks:
    """What documents are to a span."""

    real: Tensor
    """(b l) True at real tokens."""
    ids: Tensor
    """(b l) the document of each token; a pad has that of the real token before it."""
    before: Tensor
    """(b) the document that the incoming state belongs to."""

    @property
    def starts(self) -> Tensor:
        """(b l) True where a document begins, so that nothing from before may be read."""
        return self.ids != torch.cat([self.before[:, None], self.ids[:, :-1]], 1)


@dataclass(frozen=True)
class Call:
    """A call, or a span of one: tensors by name, options by name, and the masks (None without segments)."""

    timed: Mapping[str, Tensor | None]
    """Tensors (b t ...), each with a gradient."""
    fixed: Mapping[str, Tensor | None]
    """Tensors without a time axis, each with a gradient: weights."""
    options: Mapping[str, Any]
    masks: Masks | None

    def __getitem__(self, name: str) -> Any:
        for part in (self.timed, self.fixed, self.options):
            if name in part:
                return part[name]
        raise KeyError(name)

    @property
    def n_tokens(self) -> int:
        return next(x.shape[1] for x in self.timed.values() if x is not None)

    def cut(self, start: int, stop: int) -> Call:
        """The span from ``start`` to ``stop``."""
        timed = {name: None if x is None else x[:, start:stop] for name, x in self.timed.items()}
        masks = self.masks
        if masks is not None:
            before = masks.ids[:, start - 1] if start else masks.before
            masks = Masks(masks.real[:, start:stop], masks.ids[:, start:stop], before)
        return replace(self, timed=timed, masks=masks)


SpanFn: TypeAlias = Callable[[Call, States], tuple[Tensor, States]]


def chunks_at_once(elements: int, device: torch.device) -> int:
    """How many chunks a span may have whose largest tensor has ``elements`` a chunk. Sizes may be a compiler's symbols."""
    budget = SPAN_BUDGET if device.type == "cpu" else SPAN_BUDGET_GPU
    at_once: int = torch.sym_max(1, budget // torch.sym_max(1, elements))
    return at_once


@dataclass(frozen=True)
class SpanOp:
    """What :func:`span_op` makes. Called with an op's arguments, checked by the caller."""

    forward_op: Any
    backward_op: Any
    function: type[torch.autograd.Function]

    def __call__(
        self, timed: Sequence[Tensor | None], fixed: Sequence[Tensor | None], options: Sequence[Any],
        segments: Segments | None, states: States,
    ) -> tuple[Tensor, States]:
        """``timed``, ``fixed`` and ``options`` in their order; ``states`` as the incoming document left them, zeros in rows
        that begin another one. Returns y, zero at pads, and the final states."""
        masks = (None, None, None) if segments is None else (segments.real, segments.effective, segments.carried)
        # Views, since the compiler refuses one tensor in two places.
        given = [None if x is None else x.view_as(x) for x in (*timed, *fixed)]
        learning = torch.is_grad_enabled()
        device = states[0].device.type
        with torch.autocast(device, enabled=False):
            if learning:
                apply: Any = self.function.apply
                y, *rest = apply(*given, *masks, *options, *states)
                return y, tuple(rest[: len(states)])
            y, last, _ = self.forward_op(*given, *masks, *options, list(states), False)
            return y, tuple(last)


def span_op(
    name: str, span: SpanFn, *, timed: Sequence[str], fixed: Sequence[str] = (),
    options: Mapping[str, type] = MappingProxyType({"chunk_size": int}), length: Callable[[Call], int],
    like: Callable[[Call], tuple[Sequence[int], torch.dtype]], n_states: int = 1,
) -> SpanOp:
    """The op ``name`` (of which the operators are ``hybridtf::name`` and ``hybridtf::name_backward``).

    ``span``: see the module; it is given tensors as the caller gave them, and answers y and states in new memory or not.
    ``timed``, ``fixed``: names of tensors, with a ``?`` where one may be None. ``options``: names and types (int, float, bool).
    ``length``: tokens of a span of this call; ``like``: shape and dtype of y. Both may meet a compiler's symbols.
    """
    form = _Form(name, tuple(timed), tuple(fixed), options, span, length, like, n_states)
    forward_op, backward_op = form.operators()
    function = _function(form, forward_op, _flat(form, backward_op))
    return SpanOp(forward_op, backward_op, function)


@dataclass(frozen=True)
class _Form:
    """An op's description, and both passes over it."""

    name: str
    timed: tuple[str, ...]
    fixed: tuple[str, ...]
    options: Mapping[str, type]
    span: SpanFn
    length: Callable[[Call], int]
    like: Callable[[Call], tuple[Sequence[int], torch.dtype]]
    n_states: int

    @property
    def n_tensors(self) -> int:
        return len(self.timed) + len(self.fixed)

    @property
    def n_call(self) -> int:
        """Arguments of a call: tensors, three masks, options."""
        return self.n_tensors + 3 + len(self.options)

    def schema(self) -> str:
        tensors = [f"Tensor{'?' if name.endswith('?') else ''} {name.rstrip('?')}" for name in (*self.timed, *self.fixed)]
        masks = [f"Tensor? {name}" for name in ("real_tokens", "documents", "carried")]
        options = [f"{kind.__name__} {name}" for name, kind in self.options.items()]
        return ", ".join([*tensors, *masks, *options])

    def call(self, arguments: Sequence[Any]) -> Call:
        names = [name.rstrip("?") for name in (*self.timed, *self.fixed)]
        tensors = dict(zip(names, arguments, strict=False))
        timed = {name: tensors[name] for name in names[: len(self.timed)]}
        fixed = {name: tensors[name] for name in names[len(self.timed) :]}
        real, ids, carried = arguments[self.n_tensors : self.n_tensors + 3]
        masks = None if real is None else Masks(real, ids, carried)
        return Call(timed, fixed, dict(zip(self.options, arguments[self.n_tensors + 3 : self.n_call], strict=True)), masks)

    def count(self, call: Call) -> int:
        """Spans of a call, as arithmetic that holds for symbols too."""
        size = self.length(call)
        return (call.n_tokens + size - 1) // size

    def bounds(self, call: Call) -> list[tuple[int, int]]:
        size, t = self.length(call), call.n_tokens
        return [(start, min(start + size, t)) for start in range(0, t, size)]

    def forward(self, call: Call, state: list[Tensor], keep: bool) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """y, the final states, and the states before each span, stacked (none unless ``keep``)."""
        shape, dtype = self.like(call)
        y = state[0].new_empty(shape, dtype=dtype)
        starts = [x.new_empty(self.count(call) if keep else 0, *x.shape) for x in state]
        now = tuple(state)
        for i, (start, stop) in enumerate(self.bounds(call)):
            for kept, x in zip(starts, now if keep else (), strict=False):
                kept[i] = x
            part, now = self.span(call.cut(start, stop), now)
            y[:, start:stop] = part
        if call.masks is not None:
            y.masked_fill_(~call.masks.real.view(*y.shape[:2], *[1] * (y.ndim - 2)), 0)
        return y, [_own(x, given) for x, given in zip(now, state, strict=True)], starts

    def backward(self, call: Call, starts: list[Tensor], dy: Tensor, dlast: list[Tensor]) -> list[Tensor]:
        """Gradients of the tensors of a call that are not None, and of the incoming states."""
        if call.masks is not None:
            dy = dy.masked_fill(~call.masks.real.view(*dy.shape[:2], *[1] * (dy.ndim - 2)), 0)
        timed = {name: torch.zeros_like(x, memory_format=torch.contiguous_format) for name, x in _given(call.timed).items()}
        fixed: dict[str, Tensor] = {name: torch.zeros_like(x) for name, x in _given(call.fixed).items()}
        dstate = tuple(dlast)
        for i, (start, stop) in reversed(list(enumerate(self.bounds(call)))):
            part = call.cut(start, stop)
            of_timed, of_fixed, dstate = self._backward_span(part, tuple(x[i] for x in starts), dy[:, start:stop], dstate)
            for name, grad in of_timed.items():
                timed[name][:, start:stop] = grad
            for name, grad in of_fixed.items():
                fixed[name] += grad
        return [*timed.values(), *fixed.values(), *(_own(x, given) for x, given in zip(dstate, dlast, strict=True))]

    def _backward_span(
        self, part: Call, state: States, dy: Tensor, dstate: States
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], States]:
        with autograd_inside():
            timed, fixed = ({name: _leaf(x) for name, x in _given(tensors).items()} for tensors in (part.timed, part.fixed))
            before = tuple(_leaf(x) for x in state)
            call = replace(part, timed={**part.timed, **timed}, fixed={**part.fixed, **fixed})
            y, after = self.span(call, before)
            given = [*timed.values(), *fixed.values(), *before]
            # A result that depends on no input (a state that every row forgets) has nothing to differentiate.
            pairs = [(z, d.to(z.dtype)) for z, d in zip((y, *after), (dy, *dstate), strict=True) if z.requires_grad]
            grads = torch.autograd.grad(
                [z for z, _ in pairs], given, [d for _, d in pairs], allow_unused=True, materialize_grads=True
            )
        n = len(timed)
        return (
            dict(zip(timed, grads, strict=False)), dict(zip(fixed, grads[n:], strict=False)),
            grads[len(given) - len(before) :],
        )

    def operators(self) -> tuple[Any, Any]:
        schema = self.schema()

        def forward(*inputs: Any) -> tuple[Tensor, list[Tensor], list[Tensor]]:
            return self.forward(self.call(inputs), *inputs[self.n_call :])

        def backward(*inputs: Any) -> list[Tensor]:
            call = self.call(inputs)
            device = inputs[-2].device.type
            with torch.autocast("cpu" if device == "meta" else device, enabled=False):
                return self.backward(call, *inputs[self.n_call :])

        def fake_forward(*inputs: Any) -> tuple[Tensor, list[Tensor], list[Tensor]]:
            call, (state, keep) = self.call(inputs), inputs[self.n_call :]
            shape, dtype = self.like(call)
            starts = [x.new_empty(self.count(call) if keep else 0, *x.shape) for x in state]
            return state[0].new_empty(shape, dtype=dtype), [x.new_empty(x.shape) for x in state], starts

        def fake_backward(*inputs: Any) -> list[Tensor]:
            call, dlast = self.call(inputs), inputs[-1]
            given = [*_given(call.timed).values(), *_given(call.fixed).values(), *dlast]
            return [x.new_empty(x.shape) for x in given]

        forward_op: Any = torch.library.custom_op(
            f"hybridtf::{self.name}", forward, mutates_args=(),
            schema=f"({schema}, Tensor[] state, bool keep) -> (Tensor, Tensor[], Tensor[])",
        )
        forward_op.register_fake(fake_forward)
        backward_op: Any = torch.library.custom_op(
            f"hybridtf::{self.name}_backward", backward, mutates_args=(),
            schema=f"({schema}, Tensor[] starts, Tensor dy, Tensor[] dlast) -> Tensor[]",
        )
        backward_op.register_fake(fake_backward)
        count_flops(self.name, forward, backward)
        # The operators themselves, which a compiler knows, and not the objects that defined them.
        return getattr(torch.ops.hybridtf, self.name).default, getattr(torch.ops.hybridtf, f"{self.name}_backward").default


def _given(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if x is not None}


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _own(state: Tensor, given: Tensor) -> Tensor:
    """``state`` contiguous, and a copy where there was no span to make it from the one that was given."""
    return state.clone(memory_format=torch.contiguous_format) if state is given else state.contiguous()


def _flat(form: _Form, backward_op: Any) -> Callable[..., tuple[Tensor, ...]]:
    """``backward_op`` over a flat list of arguments: those of a call, then starts, dy and the gradients of the states."""
    n_call, n = form.n_call, form.n_states

    def run(*inputs: Any) -> tuple[Tensor, ...]:
        rest = inputs[n_call:]
        found: list[Tensor] = backward_op(*inputs[:n_call], list(rest[:n]), rest[n], list(rest[n + 1 :]))
        return tuple(found)

    return run


def _function(form: _Form, forward_op: Any, gradients: Any) -> type[torch.autograd.Function]:
    """The op with its gradients. Not by ``register_autograd``, which ``torch.func`` cannot pass through."""
    # Plain numbers: a compiler looks into these functions and knows no objects of ours.
    n, n_call, n_tensors, n_masked = form.n_states, form.n_call, form.n_tensors, form.n_tensors + 3
    twice: Any = first_order(gradients, form.name, "chunked")

    class Spanned(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> tuple[Tensor, ...]:
            y, last, starts = forward_op(*inputs[:n_call], list(inputs[n_call:]), True)
            return (y, *last, *starts)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            ctx.options = inputs[n_masked:n_call]
            ctx.shape, ctx.dtype = output[0].shape, output[0].dtype
            starts = output[1 + n :]
            ctx.save_for_backward(*inputs[:n_masked], *starts)
            ctx.mark_non_differentiable(*starts)
            ctx.set_materialize_grads(False)  # else starts would be given gradients of zeros, as large as themselves

        @staticmethod
        def backward(ctx: Any, dy: Tensor | None, *rest: Tensor | None) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors
            tensors, starts = saved[:n_masked], saved[n_masked:]
            dlast = [x.new_zeros(x.shape[1:]) if d is None else d for d, x in zip(rest[:n], starts, strict=True)]
            dy = starts[0].new_zeros(ctx.shape, dtype=ctx.dtype) if dy is None else dy
            op = twice.apply if torch.is_grad_enabled() else gradients
            found = list(op(*tensors, *ctx.options, *starts, dy, *dlast))
            of_states = found[len(found) - n :]
            grads = [None if x is None else found.pop(0) for x in tensors[:n_tensors]]
            return (*grads, *[None] * (n_call - n_tensors), *of_states)

    Spanned.__name__ = Spanned.__qualname__ = f"Spanned_{form.name}"
    return Spanned
