"""Calls of ``grouped_linear`` for the contract kit: rows that a router sent to groups, and rows of no group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridtf.core.op_cases import OpCase, OpInputs, randn
from hybridtf.core.segments import Segments

D_IN, D_OUT = 8, 16


def _draw(groups: int, of: int, bias: bool, gen: torch.Generator, b: int, t: int) -> OpInputs:
    """Rows go to ``of`` groups out of ``groups``; the others have none."""
    timed = {"x": randn(gen, b, t, D_IN), "group": torch.randint(of, (b, t), generator=gen)}
    fixed = {"weight": randn(gen, groups, D_IN, D_OUT), **({"bias": randn(gen, groups, D_OUT)} if bias else {})}
    return OpInputs(timed, fixed)


def _run(op: Callable[..., Tensor], inputs: OpInputs, segments: Segments | None, options: Mapping[str, Any]) -> Tensor:
    """Tokens as rows, those of a group side by side; pads behind all groups, which the op does not read."""
    x, group, weight = inputs.timed["x"], inputs.timed["group"], inputs.fixed["weight"]
    if segments is not None:
        group = group.masked_fill(~segments.real, len(weight))
    order = group.flatten().argsort(stable=True)
    ends = torch.bincount(group.flatten(), minlength=len(weight) + 1)[: len(weight)].cumsum(0)
    y: Tensor = op(x.flatten(0, 1)[order], weight, ends, inputs.fixed.get("bias"), **options)
    return torch.zeros_like(y).index_copy(0, order, y).view(*x.shape[:2], -1)


CASES: tuple[OpCase, ...] = tuple(
    OpCase("grouped_linear", name, partial(_draw, *how), sizes={"d_in": D_IN, "d_out": D_OUT}, run=_run)
    for name, how in (
        ("bias", (3, 3, True)), ("most groups without rows", (9, 2, False)), ("one group", (1, 1, False)),
    )
)
