"""``grouped_linear`` by torch's grouped product, or by blocks where torch has none. README.md has the derivation.

Both products are custom operators: a compiler sees one call each, whatever the loads of the groups.

Axes: s rows, e groups, i inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from hybridtf.core.kernels import KernelRequest
from hybridtf.ops.grouped_linear.blocks import linear_blocks, outer_blocks
from hybridtf.ops.grouped_linear.shapes import check, group_ids

ALIGNMENT = 16
"""Bytes: torch's grouped product takes rows that are multiples of it."""


def why_not_grouped(request: KernelRequest) -> str | None:
    """Devices, dtypes and widths that torch's grouped product does not take."""
    if request.device.type not in ("cpu", "cuda"):
        return f"torch has no grouped product on {request.device.type}"
    if request.dtype == torch.float64:
        return "torch has no grouped product in float64"
    odd = [f"{name} = {n}" for name, n in request.sizes.items() if n * request.dtype.itemsize % ALIGNMENT]
    if odd:
        return f"{odd[0]} is no multiple of {ALIGNMENT // request.dtype.itemsize}"
    if not hasattr(F, "grouped_mm"):
        return "this torch has no grouped_mm"
    if request.device.type == "cuda" and not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if request.device.type == "cuda" and torch.cuda.get_device_capability(request.device) < (8, 0):
        return "torch's grouped product needs compute capability 8.0"
    return None


def grouped_linear_grouped(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same function as :func:`grouped_linear_reference` by torch's grouped product; gradients of every order."""
    return _linear(x, weight, ends, bias, False)


def grouped_linear_blocks(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same function as :func:`grouped_linear_reference` by batched products of blocks, in any dtype and width."""
    return _linear(x, weight, ends, bias, True)


def _linear(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None, blocks: bool) -> Tensor:
    check(x, weight, ends, bias)
    with torch.autocast(x.device.type, enabled=False):
        op: Any = _Linear.apply if torch.is_grad_enabled() else _linear_op
        y: Tensor = op(x, weight, ends, blocks)
        if bias is None:
            return y
        groups = group_ids(ends, x.shape[0])
        shift = bias.to(x.dtype).index_select(0, groups.clamp(max=bias.shape[0] - 1))
        return y + shift.masked_fill((groups == bias.shape[0])[:, None], 0)


# -- the two products ----------------------------------------------------------------------------------------------


@torch.library.custom_op("hybridtf::grouped_linear", mutates_args=())
def _linear_op(x: Tensor, weight: Tensor, ends: Tensor, blocks: bool) -> Tensor:
    if x.shape[0] == 0:
        return x.new_zeros(0, weight.shape[2])
    # Where weights need a cast and most groups have no row, blocks cast only what is used.
    if blocks or (x.dtype != weight.dtype and x.shape[0] < weight.shape[0]):
        return linear_blocks(x, weight, ends)
    y = F.grouped_mm(x.contiguous(), weight.to(x.dtype), offs=ends.int())
    if x.device.type == "cpu":
        y[int(ends[-1]) :] = 0  # the product leaves these rows as they were
        return y
    rows = torch.arange(x.shape[0], device=x.device)
    return y.masked_fill_((rows >= ends[-1])[:, None], 0)


@_linear_op.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, blocks: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("hybridtf::grouped_outer", mutates_args=())
def _outer_op(x: Tensor, grad: Tensor, ends: Tensor, blocks: bool) -> Tensor:
    if x.shape[0] == 0:
        return x.new_zeros(ends.shape[0], x.shape[1], grad.shape[1])
    if blocks:
        return outer_blocks(x, grad, ends)
    return F.grouped_mm(x.contiguous().t(), grad.contiguous(), offs=ends.int())


@_outer_op.register_fake
def _(x: Tensor, grad: Tensor, ends: Tensor, blocks: bool) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], grad.shape[1])


def linear_flops(x: Sequence[int], weight: Sequence[int], *rest: Any, **more: Any) -> int:
    """Of one pass over all rows, two for a multiplication and an addition; a group without rows costs nothing."""
    return 2 * x[0] * weight[1] * weight[2]


def outer_flops(x: Sequence[int], grad: Sequence[int], *rest: Any, **more: Any) -> int:
    """The same of the gradient of the weights."""
    return 2 * x[0] * x[1] * grad[1]


register_flop_formula(torch.ops.hybridtf.grouped_linear)(linear_flops)
register_flop_formula(torch.ops.hybridtf.grouped_outer)(outer_flops)


class _Linear(torch.autograd.Function):
    """``_linear_op`` with its gradients, which are the two products again."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, ends: Tensor, blocks: bool) -> Tensor:
        y: Tensor = _linear_op(x, weight, ends, blocks)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, ends, ctx.blocks = inputs
        ctx.save_for_backward(x, weight, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        linear: Any = _Linear.apply if torch.is_grad_enabled() else _linear_op
        outer: Any = _Outer.apply if torch.is_grad_enabled() else _outer_op
        dx = linear(grad, weight.transpose(1, 2), ends, ctx.blocks) if ctx.needs_input_grad[0] else None
        dweight = outer(x, grad, ends, ctx.blocks).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dweight, None, None


class _Outer(torch.autograd.Function):
    """``_outer_op`` with its gradients, for derivatives of the second order on."""

    @staticmethod
    def forward(x: Tensor, grad: Tensor, ends: Tensor, blocks: bool) -> Tensor:
        out: Tensor = _outer_op(x, grad, ends, blocks)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, grad, ends, ctx.blocks = inputs
        ctx.save_for_backward(x, grad, ends)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        x, grad, ends = ctx.saved_tensors
        linear: Any = _Linear.apply if torch.is_grad_enabled() else _linear_op
        return linear(grad, outer.transpose(1, 2), ends, ctx.blocks), linear(x, outer, ends, ctx.blocks), None, None
