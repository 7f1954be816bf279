"""``selective_scan`` over chunks, in time and memory linear in the length. README.md has the derivation.

Both passes are custom operators: a compiler sees one call each, whatever the length.

Axes: b batch, t time, c channels, g groups, n states a channel, r rows (b g).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from hybridtf.core.segments import Segments
from hybridtf.ops.documents import start_state, state_dtype
from hybridtf.ops.gradients import first_order
from hybridtf.ops.selective_scan.blocks import Call
from hybridtf.ops.selective_scan.flops import backward_flops, forward_flops
from hybridtf.ops.selective_scan.passes import backward, forward
from hybridtf.ops.selective_scan.shapes import by_group, check
from hybridtf.ops.selective_scan.step import selective_scan_step


def selective_scan_chunked(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *,
    initial_state: Tensor | None = None, segments: Segments | None = None, chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """The recurrence of :func:`selective_scan_reference`, in chunks of ``chunk_size`` tokens; same arguments, results, errors.

    Everything is computed in float32 at least, and rounded once. One state a chunk is kept for the backward, which computes
    the others again. Second derivatives raise :class:`KernelError`: the reference has them.
    """
    check(x, dt, A, B, C=C, D=D, initial_state=initial_state, segments=segments, chunk_size=chunk_size)
    dtype = state_dtype(x, dt, A, B, C)
    state = start_state(initial_state, (x.shape[0], *A.shape), x, dtype, segments)
    B, C = by_group(B), by_group(C)
    with torch.autocast(x.device.type, enabled=False):
        if x.shape[1] == 1:
            return selective_scan_step(x, dt, A, B, C, D, state, segments)
        (b, c, n), g = state.shape, B.shape[2]
        by_row = state.reshape(b * g, c // g, n).transpose(1, 2)
        masks = (None, None) if segments is None else (segments.real, segments.starts)
        learning = torch.is_grad_enabled()
        op: Any = _Chunked.apply if learning else _forward_op
        # Views, since the compiler refuses one tensor in two places.
        y, last, _ = op(x, dt.view_as(dt), A, B, C.view_as(C), D, *masks, chunk_size, by_row, learning)
        return y, last.transpose(1, 2).reshape(b, c, n).contiguous()


# Fields of ``Call``.
_CALL = "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? real, Tensor? starts, int chunk_size"
_N_CALL = len(Call._fields)
_N_INPUTS = 6  # of the fields, those with a gradient


@torch.library.custom_op(
    "hybridtf::selective_scan_chunked", mutates_args=(),
    schema=f"({_CALL}, Tensor state, bool keep) -> (Tensor, Tensor, Tensor)",
)
def _forward_op(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return forward(Call(*inputs[:_N_CALL]), *inputs[_N_CALL:])


@_forward_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    call, (state, keep) = Call(*inputs[:_N_CALL]), inputs[_N_CALL:]
    befores = state.new_empty(call.count_chunks() if keep else 0, *state.shape)
    return call.x.new_empty(call.x.shape), state.new_empty(state.shape), befores


@torch.library.custom_op(
    "hybridtf::selective_scan_chunked_backward", mutates_args=(),
    schema=f"({_CALL}, Tensor befores, Tensor dy, Tensor dstate) -> ({', '.join(['Tensor'] * (_N_INPUTS + 1))})",
)
def _backward_op(*inputs: Any) -> tuple[Tensor, ...]:
    call = Call(*inputs[:_N_CALL])
    with torch.autocast(call.x.device.type, enabled=False):
        return backward(call, *inputs[_N_CALL:])


@_backward_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    call, dstate = Call(*inputs[:_N_CALL]), inputs[-1]
    found = [z.new_empty(z.shape) for z in (call.x, call.dt, call.A, call.B, call.C)]
    of_D = dstate.new_empty(()) if call.D is None else call.D.new_empty(call.D.shape)
    return *found, of_D, dstate.new_empty(dstate.shape)


register_flop_formula(torch.ops.hybridtf.selective_scan_chunked)(forward_flops)
register_flop_formula(torch.ops.hybridtf.selective_scan_chunked_backward)(backward_flops)


class _Chunked(torch.autograd.Function):
    """``_forward_op`` with its gradients. Not by ``register_autograd``, which ``torch.func`` cannot pass through."""

    @staticmethod
    def forward(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, real: Tensor | None,
        starts: Tensor | None, chunk_size: int, state: Tensor, keep: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        out: tuple[Tensor, Tensor, Tensor] = _forward_op(x, dt, A, B, C, D, real, starts, chunk_size, state, keep)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        *tensors, ctx.chunk_size = inputs[:_N_CALL]
        befores = output[2]
        ctx.save_for_backward(*tensors, befores)
        ctx.mark_non_differentiable(befores)
        ctx.set_materialize_grads(False)  # else befores would be given a gradient of zeros, as large as itself

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dstate: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        *tensors, befores = ctx.saved_tensors
        x, D = tensors[0], tensors[5]
        dy = x.new_zeros(x.shape) if dy is None else dy
        dstate = befores.new_zeros(befores.shape[1:]) if dstate is None else dstate
        op: Any = _Gradients.apply if torch.is_grad_enabled() else _backward_op
        *grads, of_D, dbefore = op(*tensors, ctx.chunk_size, befores, dy, dstate)
        return *grads, None if D is None else of_D, *[None] * (_N_CALL - _N_INPUTS), dbefore, None


_Gradients = first_order(_backward_op, "selective_scan", "chunked")
