"""``rnn`` by torch's own loops over time. README.md says how documents and the compiler are served.

Axes: b batch, t time, d input width, h width of the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from hybridtf.core.segments import Segments
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.documents import state_dtype
from hybridtf.ops.rnn.flops import backward_flops, forward_flops
from hybridtf.ops.rnn.loops import run
from hybridtf.ops.rnn.shapes import Cell, State, Weights, check, start_cell, widened
from hybridtf.ops.rnn.step import rnn_step


def rnn_fused(
    x: Tensor, weight_hh: Tensor, *, cell: Cell, weight_ih: Tensor | None = None, bias_ih: Tensor | None = None,
    bias_hh: Tensor | None = None, initial_state: Mapping[str, Tensor] | None = None, segments: Segments | None = None,
) -> tuple[Tensor, State]:
    """The recurrences of :func:`rnn_reference`; same arguments, results and errors.

    A single token is computed by plain products. Where a compiler looks on, the loops stand behind an operator whose
    backward runs them again.
    """
    check(
        x, weight_hh, cell=cell, weight_ih=weight_ih, bias_ih=bias_ih, bias_hh=bias_hh, segments=segments,
    )
    dtype = state_dtype(x, weight_hh, weight_ih)
    weights = widened(weight_hh, weight_ih, bias_ih, bias_hh, dtype)
    with no_autocast(x.device):
        state = start_cell(initial_state, cell, x, weights.width, dtype, segments)
        if x.shape[1] == 1:
            y, state = rnn_step(cell, x.to(dtype), weights, state, segments)
        elif torch.compiler.is_compiling():
            y, state = _behind_an_operator(cell, x.to(dtype), weights, state, segments)
        else:
            y, state = run(cell, x.to(dtype), weights, state, segments)
    return y.to(x.dtype), state


def _behind_an_operator(
    cell: str, x: Tensor, weights: Weights, state: State, segments: Segments | None
) -> tuple[Tensor, State]:
    masks = (None, None) if segments is None else (segments.ids, segments.continues)
    y, h, c = _forward_op(x, *weights, state["h"], state.get("c"), *masks, cell)
    return y, {"h": h, "c": c} if "c" in state else {"h": h}


_ARGUMENTS = (
    "Tensor x, Tensor weight_hh, Tensor? weight_ih, Tensor? bias_ih, Tensor? bias_hh, Tensor h, Tensor? c, Tensor? ids, "
    "Tensor? continues, str cell"
)
_N_LEAVES = 7


def _call(inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """The loops on the operator's arguments; c is empty where the cell has none."""
    x, *weights, h, c, ids, continues, cell = inputs
    segments = None if ids is None else Segments(ids, continues)
    y, state = run(cell, x, Weights(*weights), {"h": h} if c is None else {"h": h, "c": c}, segments)
    return y, state["h"], state.get("c", h.new_empty(0))


@torch.library.custom_op("hybridtf::rnn", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
def _forward_op(*inputs: Any) -> tuple[Tensor, ...]:
    return tuple(_own(z, inputs) for z in _call(inputs))


def _own(z: Tensor, inputs: tuple[Any, ...]) -> Tensor:
    """``z`` as an operator may return it: not one of its arguments, as a call of no tokens would."""
    return z.clone() if any(z is given for given in inputs) else z.contiguous()


@_forward_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, h, c = inputs[0], inputs[5], inputs[6]
    return x.new_empty(*x.shape[:2], h.shape[1]), h.new_empty(h.shape), h.new_empty(0 if c is None else h.shape)


@torch.library.custom_op(
    "hybridtf::rnn_backward", mutates_args=(),
    schema=f"({_ARGUMENTS}, Tensor dy, Tensor dh, Tensor dc) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(*inputs: Any) -> tuple[Tensor, ...]:
    given, d_out = inputs[:-3], inputs[-3:]
    # An operator runs below autograd; torch's loops have no backward but autograd's, so it is let in again.
    keys = torch._C._dispatch_tls_local_include_set(), torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    with torch._C._ForceDispatchKeyGuard(*keys), torch.enable_grad():
        tensors = [None if z is None else z.detach().clone().requires_grad_() for z in given[:_N_LEAVES]]
        leaves = [z for z in tensors if z is not None]
        out = _call((*tensors, *given[_N_LEAVES:]))
        learned = [i for i, z in enumerate(out) if z.requires_grad]  # of no tokens nothing is learned
        roots, weights = [out[i] for i in learned], [d_out[i] for i in learned]
        found = torch.autograd.grad(roots, leaves, weights, allow_unused=True) if learned else [None] * len(leaves)
    grads = iter(torch.zeros_like(z) if g is None else _own(g, d_out) for z, g in zip(leaves, found, strict=True))
    return tuple(given[0].new_empty(0) if z is None else next(grads) for z in tensors)


@_backward_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    return tuple(inputs[0].new_empty(0 if z is None else z.shape) for z in inputs[:_N_LEAVES])


register_flop_formula(torch.ops.hybridtf.rnn)(forward_flops)
register_flop_formula(torch.ops.hybridtf.rnn_backward)(backward_flops)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.cell = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, *d_out: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    grads = _backward_op(*tensors, ctx.cell, *d_out)
    return *(None if z is None else g for z, g in zip(tensors, grads, strict=False)), None, None, None


_forward_op.register_autograd(_backward, setup_context=_setup_context)
