"""``linear_scan`` by sweeps over chunks side by side, in time and memory linear in the length. README.md has the derivation.

Both passes are custom operators: a compiler sees one call each, whatever the length.

Axes: b batch, t time, c channels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from hybridtf.core.segments import Segments
from hybridtf.ops.gradients import first_order
from hybridtf.ops.linear_scan.flops import backward_flops, forward_flops
from hybridtf.ops.linear_scan.passes import backward, forward
from hybridtf.ops.linear_scan.shapes import Arguments, Number, Parts, check, number, start_parts
from hybridtf.ops.linear_scan.spans import Call
from hybridtf.ops.linear_scan.step import linear_scan_step


def linear_scan_chunked(
    u: Number, log_a: Number | None = None, *, a: Number | None = None, initial_state: Number | None = None,
    segments: Segments | None = None,
) -> tuple[Number, Number]:
    """The recurrence of :func:`linear_scan_reference` without a loop over time; same arguments, results and errors.

    States are float32 at least, what passes from chunk to chunk is float64. The backward keeps the states, which are the
    result, and the factor. Second derivatives raise :class:`KernelError`: the reference has them.
    """
    args = check(u, log_a, a, initial_state, segments)
    shape = args.u[0].shape
    with torch.autocast(args.u[0].device.type, enabled=False):
        state = start_parts(args)
        if shape[1] == 1:
            h, last = linear_scan_step(args, state)
        else:
            h, last = _run(args, state)
    return number(h), number(last)


def _run(args: Arguments, state: Parts) -> tuple[Parts, Parts]:
    segments, (b, t, *channels) = args.segments, args.u[0].shape
    # Each a view of its own, since the compiler refuses one tensor in two places.
    c = math.prod(channels)
    flat = [x.reshape(b, t, c) for x in args.u]
    decay = [x.reshape(b, t, c) if x.ndim == args.u[0].ndim else x.reshape(c) for x in args.decay]
    start = [x.reshape(b, c) for x in state]
    masks = (None, None) if segments is None else (segments.real, segments.starts)
    if torch.is_grad_enabled():
        function: Any = _Chunked.apply
        pairs = [x for part in (flat, decay, start) for x in (*part, None)[:2]]
        h, last = function(args.log, *masks, *pairs)
    else:
        op: Any = _forward_op
        h, last = op(flat, decay, args.log, *masks, start)
    if len(flat) == 1:
        return (h.view(b, t, *channels),), (last.view(b, *channels),)
    return tuple(x.view(b, t, *channels) for x in h.unbind(0)), tuple(x.view(b, *channels) for x in last.unbind(0))


@torch.library.custom_op(
    "hybridtf::linear_scan", mutates_args=(),
    schema="(Tensor[] u, Tensor[] decay, bool log, Tensor? real, Tensor? starts, Tensor[] state) -> (Tensor, Tensor)",
)
def _forward_op(
    u: list[Tensor], decay: list[Tensor], log: bool, real: Tensor | None, starts: Tensor | None, state: list[Tensor]
) -> tuple[Tensor, Tensor]:
    return forward(Call(tuple(decay), log, real, starts), tuple(u), tuple(state))


@_forward_op.register_fake
def _(u: list[Tensor], decay: list[Tensor], log: bool, real: Any, starts: Any, state: list[Tensor]) -> Any:
    return state[0].new_empty(len(u), *u[0].shape), state[0].new_empty(len(u), *state[0].shape)


@torch.library.custom_op(
    "hybridtf::linear_scan_backward", mutates_args=(),
    schema="(Tensor[] u, Tensor[] decay, bool log, Tensor? real, Tensor? starts, Tensor[] state, Tensor h, Tensor dh, "
    "Tensor dlast) -> Tensor[]",
)
def _backward_op(
    u: list[Tensor], decay: list[Tensor], log: bool, real: Tensor | None, starts: Tensor | None, state: list[Tensor],
    h: Tensor, dh: Tensor, dlast: Tensor,
) -> list[Tensor]:
    # ``u`` has the dtypes of its gradients, and no elements.
    call = Call(tuple(decay), log, real, starts)
    du, ddecay, dstate = backward(call, tuple(x.dtype for x in u), tuple(state), h, dh, dlast)
    return [*du, *ddecay, *dstate]


@_backward_op.register_fake
def _(u: list[Tensor], decay: list[Tensor], log: bool, real: Any, starts: Any, state: list[Tensor], h: Any, *_: Any) -> Any:
    du = [x.new_empty(h.shape[1:]) for x in u]
    return [*du, *(x.new_empty(x.shape) for x in (*decay, *state))]


register_flop_formula(torch.ops.hybridtf.linear_scan)(forward_flops)
register_flop_formula(torch.ops.hybridtf.linear_scan_backward)(backward_flops)


def _given(*parts: Tensor | None) -> list[Tensor]:
    return [x for x in parts if x is not None]


class _Chunked(torch.autograd.Function):
    """``_forward_op`` with its gradients. Not by ``register_autograd``, which ``torch.func`` cannot pass through."""

    @staticmethod
    def forward(
        log: bool, real: Tensor | None, starts: Tensor | None, u: Tensor, u_im: Tensor | None, decay: Tensor,
        decay_im: Tensor | None, state: Tensor, state_im: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = _forward_op(
            _given(u, u_im), _given(decay, decay_im), log, real, starts, _given(state, state_im)
        )
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.log, real, starts, u, u_im, *rest = inputs
        empty = [None if x is None else x.new_empty(0) for x in (u, u_im)]
        ctx.save_for_backward(real, starts, *empty, *rest, output[0])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        real, starts, *parts, h = ctx.saved_tensors
        dh = h.new_zeros(()).expand(h.shape) if dh is None else dh
        dlast = h.new_zeros(h.shape[0], h.shape[1], h.shape[3]) if dlast is None else dlast
        op: Any = _Gradients.apply if torch.is_grad_enabled() else _gradients
        grads = op(ctx.log, real, starts, *parts, h, dh, dlast)
        if parts[1] is not None:
            return None, None, None, *grads
        return None, None, None, grads[0], None, grads[1], None, grads[2], None


def _gradients(
    log: bool, real: Tensor | None, starts: Tensor | None, u: Tensor, u_im: Tensor | None, decay: Tensor,
    decay_im: Tensor | None, state: Tensor, state_im: Tensor | None, h: Tensor, dh: Tensor, dlast: Tensor,
) -> tuple[Tensor, ...]:
    parts = _given(u, u_im), _given(decay, decay_im), log, real, starts, _given(state, state_im)
    found: list[Tensor] = _backward_op(*parts, h, dh, dlast)
    return tuple(found)


_Gradients = first_order(_gradients, "linear_scan", "chunked")
