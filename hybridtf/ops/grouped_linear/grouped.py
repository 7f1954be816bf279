"""``grouped_linear`` by torch's grouped product, or by blocks where torch has none. README.md has the derivation.

Both products are custom operators: a compiler sees one call each, whatever the loads of the groups.

Axes: s rows, e groups, i inputs, o outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from hybridtf.core.kernels import KernelRequest
from hybridtf.ops.autocast import no_autocast
from hybridtf.ops.grouped_linear.blocks import linear_blocks, outer_blocks
from hybridtf.ops.grouped_linear.rows import is_few, linear_rows
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
    with no_autocast(x.device):
        if is_few(x, ends):
            y = linear_rows(x, weight, ends)
        else:
            op: Any = _Linear.apply if torch.is_grad_enabled() else _linear_op
            y = op(x, weight, ends, blocks)
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
    weight = weight.to(x.dtype)
    if not (weight.is_contiguous() or weight.mT.is_contiguous()):  # torch's product takes no other strides
        weight = weight.contiguous()
    y = F.grouped_mm(x.contiguous(), weight, offs=ends.int())
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


Pair: TypeAlias = tuple[Tensor | None, Tensor | None]


def _product(operator: Any, gradients: Callable[..., Pair]) -> Any:
    """``operator(a, b, ends, blocks)`` with ``gradients(needed, d, a, b, ends, blocks)`` for those of a and b."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(a: Tensor, b: Tensor, ends: Tensor, blocks: bool) -> Tensor:
            out: Tensor = operator(a, b, ends, blocks)
            return out

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            a, b, ends, ctx.blocks = inputs
            ctx.save_for_backward(a, b, ends)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            return *gradients(ctx.needs_input_grad, grad, *ctx.saved_tensors, ctx.blocks), None, None

    return Product


def _of_linear(needed: Sequence[bool], grad: Tensor, x: Tensor, weight: Tensor, ends: Tensor, blocks: bool) -> Pair:
    linear, outer = (_Linear.apply, _Outer.apply) if torch.is_grad_enabled() else (_linear_op, _outer_op)
    dx = linear(grad, weight.transpose(1, 2), ends, blocks) if needed[0] else None
    dweight = outer(x, grad, ends, blocks).to(weight.dtype) if needed[1] else None
    return dx, dweight


def _of_outer(needed: Sequence[bool], outer: Tensor, x: Tensor, grad: Tensor, ends: Tensor, blocks: bool) -> Pair:
    """For derivatives of the second order on."""
    linear: Any = _Linear.apply if torch.is_grad_enabled() else _linear_op
    return linear(grad, outer.transpose(1, 2), ends, blocks), linear(x, outer, ends, blocks)


_Linear = _product(torch.ops.hybridtf.grouped_linear.default, _of_linear)
_Outer = _product(torch.ops.hybridtf.grouped_outer.default, _of_outer)
