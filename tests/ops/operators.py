"""What tests ask of the operators of a ``passes_op``: that they are well formed, and what both passes do from inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.passes_op import PassesOp


def arguments(tensors: Sequence[Tensor | None], segments: Segments | None, options: Sequence[Any]) -> tuple[Any, ...]:
    """Those of a call, as both operators begin with them."""
    masks = (None,) * 3 if segments is None else (segments.real, segments.effective, segments.carried)
    return (*tensors, *masks, *options)


def check_operators(
    op: PassesOp, given: Sequence[Any], states: Sequence[Tensor], *, by_result: bool = False
) -> None:
    """Schema and fakes of both operators, by torch's own check; results contiguous, as the compiler is told.

    ``given``: see :func:`arguments`. ``by_result``: the backward is given y and the incoming states, and not the states
    before each span.
    """
    for keep in (False, True):
        torch.library.opcheck(op.forward_op, (*given, list(states), keep))
    y, last, starts = op.forward_op(*given, list(states), True)
    kept = [y, *states] if by_result else starts
    back = (*given, kept, torch.randn_like(y), [torch.randn_like(z) for z in last])
    torch.library.opcheck(op.backward_op, back)
    assert all(z.is_contiguous() for z in (y, *last, *starts, *op.backward_op(*back)))


def inside(
    op: PassesOp, given: Sequence[Any], states: Sequence[Tensor], *, by_result: bool = False, backward: bool = True
) -> tuple[Any, ...]:
    """Both passes, or the forward without what is kept for the other, as plain code that modes look into.

    A dispatch mode sees an operator as one call; its implementation for the CPU is looked into.
    """
    forward, back = op.passes
    y, last, starts = forward(*given, list(states), backward)
    if not backward:
        return y, last, starts
    kept = [y, *states] if by_result else starts
    return y, last, starts, back(*given, kept, torch.ones_like(y), [torch.ones_like(z) for z in last])
