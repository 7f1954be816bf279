"""``ssd`` by matrix products over chunks, in time and memory linear in the length. README.md has the derivation.

Both passes are custom operators: a compiler sees one call each, whatever the length.

Axes: b batch, t time, g groups, r heads a group, h = g r, n keys, p values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import log_steps, memory_shape, start_state, state_dtype
from hybridtf.ops.gradients import first_order
from hybridtf.ops.ssd.flops import backward_flops, forward_flops
from hybridtf.ops.ssd.passes import backward, forward
from hybridtf.ops.ssd.shapes import check
from hybridtf.ops.ssd.spans import Call, count_spans
from hybridtf.ops.ssd.step import ssd_step


def ssd_chunked(
    q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, *, initial_state: Tensor | None = None,
    segments: Segments | None = None, chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The recurrence of :func:`ssd_reference`, in chunks of ``chunk_size`` tokens; same arguments, results and errors.

    Decays and states are float32 at least, sums of ``log_a`` float64; matrix products of bfloat16 inputs inside a chunk
    run in bfloat16. The backward recomputes what a chunk needs. Second derivatives raise :class:`KernelError`: the
    reference has them.
    """
    check(k, v, log_a, q=q, initial_state=initial_state, segments=segments, chunk_size=chunk_size)
    dtype = state_dtype(q, k, v, log_a)
    state = start_state(initial_state, memory_shape(k, v), v, dtype, segments)
    with torch.autocast(v.device.type, enabled=False):
        if v.shape[1] == 1:
            return ssd_step(q, k, v, log_a, state, segments)
        (b, h, n, p), g = state.shape, k.shape[2]
        # Heads of a group side by side, so that one matrix product serves them all: (b g n r p).
        grouped = state.reshape(b, g, h // g, n, p).transpose(2, 3)
        masks = (None, None, None) if segments is None else (segments.real, segments.effective, segments.carried)
        steps = log_steps(log_a, segments, dtype)
        learning = torch.is_grad_enabled()
        op: Any = _Chunked.apply if learning else _forward_op
        # Views, since the compiler refuses one tensor in two places.
        y, last, _ = op(q, k.view_as(k), v.view_as(v), steps, *masks, chunk_size, grouped, learning)
        return y, last.transpose(2, 3).reshape(b, h, n, p)


# Fields of ``Call``.
_CALL = "Tensor q, Tensor k, Tensor v, Tensor log_a, Tensor? real, Tensor? ids, Tensor? carried, int chunk_size"
_N_CALL = len(Call._fields)


@torch.library.custom_op(
    "hybridtf::ssd_chunked", mutates_args=(), schema=f"({_CALL}, Tensor state, bool keep) -> (Tensor, Tensor, Tensor)"
)
def _forward_op(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return forward(Call(*inputs[:_N_CALL]), *inputs[_N_CALL:])


@_forward_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    call, (state, keep) = Call(*inputs[:_N_CALL]), inputs[_N_CALL:]
    starts = state.new_empty(count_spans(call) if keep else 0, *state.shape)
    return call.v.new_empty(call.v.shape), state.new_empty(state.shape), starts


@torch.library.custom_op(
    "hybridtf::ssd_chunked_backward", mutates_args=(),
    schema=f"({_CALL}, Tensor starts, Tensor dy, Tensor dstate) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(*inputs: Any) -> tuple[Tensor, ...]:
    call = Call(*inputs[:_N_CALL])
    with torch.autocast(call.v.device.type, enabled=False):
        return backward(call, *inputs[_N_CALL:])


@_backward_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    call, dstate = Call(*inputs[:_N_CALL]), inputs[-1]
    return tuple(x.new_empty(x.shape) for x in (call.q, call.k, call.v, call.log_a, dstate))


register_flop_formula(torch.ops.hybridtf.ssd_chunked)(forward_flops)
register_flop_formula(torch.ops.hybridtf.ssd_chunked_backward)(backward_flops)


class _Chunked(torch.autograd.Function):
    """``_forward_op`` with its gradients. Not by ``register_autograd``, which ``torch.func`` cannot pass through."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, real: Tensor | None, ids: Tensor | None,
        carried: Tensor | None, chunk_size: int, state: Tensor, keep: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        out: tuple[Tensor, Tensor, Tensor] = _forward_op(
            q, k, v, log_a, real, ids, carried, chunk_size, state, keep
        )
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        *tensors, ctx.chunk_size = inputs[:_N_CALL]
        starts = output[2]
        ctx.save_for_backward(*tensors, starts)
        ctx.mark_non_differentiable(starts)
        ctx.set_materialize_grads(False)  # else starts would be given a gradient of zeros, as large as itself

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dstate: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        *tensors, starts = ctx.saved_tensors
        v = tensors[2]
        dy = v.new_zeros(v.shape) if dy is None else dy
        dstate = starts.new_zeros(starts.shape[1:]) if dstate is None else dstate
        op: Any = _Gradients.apply if torch.is_grad_enabled() else _backward_op
        *grads, dstart = op(*tensors, ctx.chunk_size, starts, dy, dstate)
        return *grads, *[None] * (_N_CALL - 4), dstart, None


_Gradients = first_order(_backward_op, "ssd", "chunked")
