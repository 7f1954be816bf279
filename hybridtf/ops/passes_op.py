"""An op over time out of its two passes: one operator each for a compiler, gradients of the first order, FLOP counts.

An op's author writes ``forward(call, states, keep)`` and ``backward(call, kept, dy, dlast)`` as plain code that autograd does
not see; :func:`passes_op` makes custom operators of them, and one function with gradients. Where one function of a span
says all, ``span_op.py`` writes both passes.

Axes: b batch, t time, l places of a span.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.flop_formulas import register_useful
from hybridtf.ops.gradients import count_flops, first_order

States: TypeAlias = tuple[Tensor, ...]


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
        if (start, stop) == (0, self.n_tokens):
            return self
        timed = {name: None if x is None else x[:, start:stop] for name, x in self.timed.items()}
        masks = self.masks
        if masks is not None:
            before = masks.ids[:, start - 1] if start else masks.before
            masks = Masks(masks.real[:, start:stop], masks.ids[:, start:stop], before)
        return replace(self, timed=timed, masks=masks)


ForwardPass: TypeAlias = Callable[[Call, list[Tensor], bool], tuple[Tensor, list[Tensor], list[Tensor]]]
BackwardPass: TypeAlias = Callable[[Call, list[Tensor], Tensor, list[Tensor]], list[Tensor]]
FlopFormula: TypeAlias = Callable[..., int]


@dataclass(frozen=True)
class PassesOp:
    """What :func:`passes_op` makes. Called with an op's arguments, checked by the caller."""

    forward_op: Any
    backward_op: Any
    function: type[torch.autograd.Function]
    passes: tuple[Callable[..., Any], Callable[..., Any]]
    """Both over the arguments of their operators, as plain code that a dispatch mode sees into."""

    def __call__(
        self, timed: Sequence[Tensor | None], fixed: Sequence[Tensor | None], options: Sequence[Any],
        segments: Segments | None, states: Sequence[Tensor],
    ) -> tuple[Tensor, States]:
        """``timed``, ``fixed`` and ``options`` in their order; ``states`` as the incoming document left them, zeros in rows
        that begin another one. Returns y and the final states."""
        masks = (None, None, None) if segments is None else (segments.real, segments.effective, segments.carried)
        # Views, since the compiler refuses one tensor in two places.
        given = [None if x is None else x.view_as(x) for x in (*timed, *fixed)]
        with no_autocast(states[0].device):
            if torch.is_grad_enabled():
                apply: Any = self.function.apply
                y, *rest = apply(*given, *masks, *options, *states)
                return y, tuple(rest[: len(states)])
            y, last, _ = self.forward_op(*given, *masks, *options, list(states), False)
            return y, tuple(last)


def passes_op(
    name: str, forward: ForwardPass, backward: BackwardPass, *, timed: Sequence[str], fixed: Sequence[str] = (),
    options: Mapping[str, type] = MappingProxyType({"chunk_size": int}),
    like: Callable[[Call], tuple[Sequence[int], torch.dtype]], count: Callable[[Call], int] | None = None,
    unread: Sequence[str] = (), flops: tuple[FlopFormula, FlopFormula] | None = None,
    useful: tuple[FlopFormula, FlopFormula] | None = None,
) -> PassesOp:
    """The op ``name`` (of which the operators are ``hybridtf::name`` and ``hybridtf::name_backward``).

    ``forward`` gives y, the final states (contiguous, in new memory) and what the backward asks for: of each state its values
    before ``count(call)`` spans, stacked (none without ``keep``). ``count`` None: nothing; the backward is given y and the
    incoming states. ``backward`` gives the gradients of the tensors of a call that are not None, in their order, and of the
    incoming states.
    ``timed``, ``fixed``: names of tensors, with a ``?`` where one may be None. ``options``: names and types (int, float, bool).
    ``like``: shape and dtype of y, which may meet a compiler's symbols, as ``count`` may. ``unread``: names of tensors that
    the backward knows by shape and dtype alone: they are not kept. ``flops``: formulas of both passes over the shapes of
    their arguments; None: counted by running them on tensors without data. ``useful``: the same of what is asked for, of an op
    whose work is elementwise: that work then counts.
    """
    form = _Form(tuple(timed), tuple(fixed), options, like, count, tuple(unread))
    passes = form.over_arguments(forward, backward)
    form.define(name, *passes)
    # The operators themselves, which a compiler knows, and not the objects that defined them.
    forward_op, backward_op = (getattr(torch.ops.hybridtf, n) for n in (name, f"{name}_backward"))
    if flops is None:
        count_flops(name, *passes, elementwise=useful is not None)
    for operator, formula in zip((forward_op, backward_op), flops or (), strict=False):
        register_flop_formula(operator)(formula)
    for operator, formula in zip((forward_op, backward_op), useful or (), strict=False):
        register_useful(operator, formula)
    function = _function(name, form, forward_op.default, backward_op.default)
    return PassesOp(forward_op.default, backward_op.default, function, passes)


@dataclass(frozen=True)
class _Form:
    """How the arguments of an op lie in those of its operators."""

    timed: tuple[str, ...]
    fixed: tuple[str, ...]
    options: Mapping[str, type]
    like: Callable[[Call], tuple[Sequence[int], torch.dtype]]
    count: Callable[[Call], int] | None
    unread: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        return [name.rstrip("?") for name in (*self.timed, *self.fixed)]

    @property
    def n_call(self) -> int:
        """Arguments of a call: tensors, three masks, options."""
        return len(self.names) + 3 + len(self.options)

    def schema(self) -> str:
        tensors = [f"Tensor{'?' if name.endswith('?') else ''} {name.rstrip('?')}" for name in (*self.timed, *self.fixed)]
        masks = [f"Tensor? {name}" for name in ("real_tokens", "documents", "carried")]
        options = [f"{kind.__name__} {name}" for name, kind in self.options.items()]
        return ", ".join([*tensors, *masks, *options])

    def call(self, arguments: Sequence[Any]) -> Call:
        n = len(self.names)
        tensors = dict(zip(self.names, arguments, strict=False))
        timed = {name: tensors[name] for name in self.names[: len(self.timed)]}
        fixed = {name: tensors[name] for name in self.names[len(self.timed) :]}
        real, ids, carried = arguments[n : n + 3]
        masks = None if real is None else Masks(real, ids, carried)
        return Call(timed, fixed, dict(zip(self.options, arguments[n + 3 : self.n_call], strict=True)), masks)

    def over_arguments(self, forward: ForwardPass, backward: BackwardPass) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Both passes over the arguments of their operators."""

        def run_forward(*inputs: Any) -> tuple[Tensor, list[Tensor], list[Tensor]]:
            return forward(self.call(inputs), *inputs[self.n_call :])

        def run_backward(*inputs: Any) -> list[Tensor]:
            with no_autocast(inputs[-2].device):
                return backward(self.call(inputs), *inputs[self.n_call :])

        return run_forward, run_backward

    def define(self, name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """The operators, of passes over their arguments."""
        schema = self.schema()

        def fake_forward(*inputs: Any) -> tuple[Tensor, list[Tensor], list[Tensor]]:
            call, (state, keep) = self.call(inputs), inputs[self.n_call :]
            shape, dtype = self.like(call)
            n = self.count(call) if keep and self.count is not None else 0
            starts = [] if self.count is None else [x.new_empty(n, *x.shape) for x in state]
            return state[0].new_empty(shape, dtype=dtype), [x.new_empty(x.shape) for x in state], starts

        def fake_backward(*inputs: Any) -> list[Tensor]:
            given = [*(x for x in inputs[: len(self.names)] if x is not None), *inputs[-1]]
            return [x.new_empty(x.shape) for x in given]

        forward_op: Any = torch.library.custom_op(
            f"hybridtf::{name}", forward, mutates_args=(),
            schema=f"({schema}, Tensor[] state, bool keep) -> (Tensor, Tensor[], Tensor[])",
        )
        forward_op.register_fake(fake_forward)
        backward_op: Any = torch.library.custom_op(
            f"hybridtf::{name}_backward", backward, mutates_args=(),
            schema=f"({schema}, Tensor[] kept, Tensor dy, Tensor[] dlast) -> Tensor[]",
        )
        backward_op.register_fake(fake_backward)


def _flat(n_call: int, backward_op: Any) -> Callable[..., tuple[Tensor, ...]]:
    """``backward_op`` over a flat list of arguments: those of a call, then what was kept (one or more tensors less than one of
    each state), dy, and the gradients of the states."""

    def run(*inputs: Any) -> tuple[Tensor, ...]:
        rest = inputs[n_call:]
        n = (len(rest) - 1) // 2  # states
        found: list[Tensor] = backward_op(*inputs[:n_call], list(rest[: len(rest) - n - 1]), rest[-n - 1], list(rest[-n:]))
        return tuple(found)

    return run


def _without(tensors: Sequence[Tensor | None], unread: Sequence[int]) -> tuple[list[Tensor | None], list[Any]]:
    """The tensors with none of the elements of those ``unread``, and the shapes of these."""
    found = [None if x is None else x.new_empty(0) if i in unread else x for i, x in enumerate(tensors)]
    return found, [None if x is None else x.shape for x in (tensors[i] for i in unread)]


def _with(tensors: Sequence[Tensor | None], unread: Sequence[int], shapes: Sequence[Any]) -> list[Tensor | None]:
    """The tensors again, those that were left out as one zero spread over their shape."""
    found = list(tensors)
    for i, shape in zip(unread, shapes, strict=True):
        x = found[i]
        found[i] = None if x is None else x.new_zeros(()).expand(shape)
    return found


def _function(name: str, form: _Form, forward_op: Any, backward_op: Any) -> type[torch.autograd.Function]:
    """The op with its gradients. Not by ``register_autograd``, which ``torch.func`` cannot pass through."""
    # Plain numbers: a compiler looks into these functions and knows no objects of ours.
    n_call, n_tensors, n_masked, by_result = form.n_call, len(form.names), len(form.names) + 3, form.count is None
    unread = tuple(form.names.index(x) for x in form.unread)
    gradients = _flat(n_call, backward_op)
    twice: Any = first_order(gradients, name.removesuffix("_chunked"), "chunked")

    class Op(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> tuple[Tensor, ...]:
            y, last, starts = forward_op(*inputs[:n_call], list(inputs[n_call:]), True)
            return (y, *last, *starts)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            ctx.options = inputs[n_masked:n_call]
            ctx.shape, ctx.dtype, ctx.n = output[0].shape, output[0].dtype, len(inputs) - n_call
            tensors, ctx.unread = _without(inputs[:n_masked], unread)
            starts = output[1 + ctx.n :]
            ctx.save_for_backward(*tensors, *((output[0], *inputs[n_call:]) if by_result else starts))
            ctx.mark_non_differentiable(*starts)
            ctx.set_materialize_grads(False)  # else starts would be given gradients of zeros, as large as themselves

        @staticmethod
        def backward(ctx: Any, dy: Tensor | None, *rest: Tensor | None) -> tuple[Tensor | None, ...]:
            saved = ctx.saved_tensors
            tensors, kept = _with(saved[:n_masked], unread, ctx.unread), saved[n_masked:]
            states = zip(rest[: ctx.n], kept[-ctx.n :], strict=True)
            dlast = [x.new_zeros(x.shape if by_result else x.shape[1:]) if d is None else d for d, x in states]
            dy = kept[0].new_zeros(ctx.shape, dtype=ctx.dtype) if dy is None else dy
            op = twice.apply if torch.is_grad_enabled() else gradients
            found = list(op(*tensors, *ctx.options, *kept, dy, *dlast))
            of_states = found[len(found) - ctx.n :]
            grads = [None if x is None else found.pop(0) for x in tensors[:n_tensors]]
            return (*grads, *[None] * (n_call - n_tensors), *of_states)

    Op.__name__ = Op.__qualname__ = f"Passes_{name}"
    return Op
