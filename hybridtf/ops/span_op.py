"""An op over time out of one function of a span: memory linear in the length, gradients of the first order, one operator
for a compiler.

An op's author writes what happens in a span of tokens, as plain differentiable torch: ``span(call, state) -> (y, state)``.
:func:`span_op` walks the spans in order, keeps only the state before each, and for the gradients computes each span again and
lets autograd differentiate that one, last span first; or calls what the author wrote for them by hand.

Axes: b batch, t time, l places of a span.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from hybridtf.ops.gradients import autograd_inside
from hybridtf.ops.passes_op import Call, FlopFormula, PassesOp, States, passes_op
from hybridtf.ops.spans import count_spans, spans_of

SpanFn: TypeAlias = Callable[[Call, States], tuple[Tensor, States]]


class SpanGradients(NamedTuple):
    """Gradients of a span: of its tensors that are not None, in their order, and of the states before it."""

    timed: Sequence[Tensor]
    fixed: Sequence[Tensor]
    states: States


SpanBackward: TypeAlias = Callable[[Call, States, Tensor, States], SpanGradients]
"""``backward(call, states, dy, dstates)``: the states are those before the span, ``dstates`` the gradients of those after."""


def span_op(
    name: str, span: SpanFn, *, timed: Sequence[str], fixed: Sequence[str] = (),
    options: Mapping[str, type] = MappingProxyType({"chunk_size": int}), length: Callable[[Call], int],
    like: Callable[[Call], tuple[Sequence[int], torch.dtype]], chunk: Callable[[Call], int] | None = None,
    backward: SpanBackward | None = None, flops: tuple[FlopFormula, FlopFormula] | None = None,
    useful: tuple[FlopFormula, FlopFormula] | None = None,
) -> PassesOp:
    """The op ``name``; see :func:`passes_op`, to which ``timed``, ``fixed``, ``options``, ``like``, ``flops`` and ``useful``
    go. y is zero at pads, whatever a span answers there.

    ``span``: see the module; it is given tensors as the caller gave them, and answers y and states in new memory or not.
    ``length``: tokens of a span of this call; with ``chunk``, a multiple of its tokens: spans are whole chunks then, and what
    is shorter is a span of its own. Both may meet a compiler's symbols.
    ``backward``: the gradients of a span, where autograd's are too slow or too inexact; it is given a ``dy`` of zeros at pads.
    """
    walk = _Walk(span, length, chunk or length, like, backward or _by_autograd(span))
    return passes_op(
        name, walk.forward, walk.backward, timed=timed, fixed=fixed, options=options, like=like, count=walk.count, flops=flops,
        useful=useful,
    )


@dataclass(frozen=True)
class _Walk:
    """Both passes over the spans of a call."""

    span: SpanFn
    length: Callable[[Call], int]
    chunk: Callable[[Call], int]
    like: Callable[[Call], tuple[Sequence[int], torch.dtype]]
    gradients: SpanBackward

    def count(self, call: Call) -> int:
        """Spans of a call, as arithmetic that holds for symbols too."""
        size = self.chunk(call)
        return count_spans(call.n_tokens, size, self.length(call) // size)

    def bounds(self, call: Call) -> list[tuple[int, int]]:
        size = self.chunk(call)
        return [(x.start, x.stop) for x in spans_of(call.n_tokens, size, self.length(call) // size)]

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
        given = list(_given(call.fixed).values())
        timed = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in _given(call.timed).values()]
        # Summed over spans in the precision of the states, and rounded once.
        fixed = [x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, dlast[0].dtype)) for x in given]
        dstate = tuple(dlast)
        for i, (start, stop) in reversed(list(enumerate(self.bounds(call)))):
            states = tuple(x[i] for x in starts)
            found = self.gradients(call.cut(start, stop), states, dy[:, start:stop], dstate)
            for whole, part in zip(timed, found.timed, strict=True):
                whole[:, start:stop] = part
            for total, part in zip(fixed, found.fixed, strict=True):
                total += part
            dstate = found.states
        of_fixed = (total.to(x.dtype) for total, x in zip(fixed, given, strict=True))
        return [*timed, *of_fixed, *(_own(x, given) for x, given in zip(dstate, dlast, strict=True))]


def _by_autograd(span: SpanFn) -> SpanBackward:
    def gradients(part: Call, states: States, dy: Tensor, dstate: States) -> SpanGradients:
        with autograd_inside():
            timed, fixed = ({name: _leaf(x) for name, x in _given(tensors).items()} for tensors in (part.timed, part.fixed))
            before = tuple(_leaf(x) for x in states)
            call = replace(part, timed={**part.timed, **timed}, fixed={**part.fixed, **fixed})
            y, after = span(call, before)
            given = [*timed.values(), *fixed.values(), *before]
            # A result that depends on no input (a state that every row forgets) has nothing to differentiate.
            pairs = [(z, d.to(z.dtype)) for z, d in zip((y, *after), (dy, *dstate), strict=True) if z.requires_grad]
            grads = torch.autograd.grad(
                [z for z, _ in pairs], given, [d for _, d in pairs], allow_unused=True, materialize_grads=True
            )
        n, m = len(timed), len(timed) + len(fixed)
        return SpanGradients(grads[:n], grads[n:m], grads[m:])

    return gradients


def _given(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if x is not None}


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _own(state: Tensor, given: Tensor) -> Tensor:
    """``state`` contiguous, and a copy where there was no span to make it from the one that was given."""
    return state.clone(memory_format=torch.contiguous_format) if state is given else state.contiguous()
