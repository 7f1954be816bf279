"""Calls of ``stick_breaking`` for the contract kit: windows, and a query's own key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from hybridtf.core.op_cases import OpCase, OpInputs
from hybridtf.core.segments import Segments
from hybridtf.ops.attention.cases import draw, masked


def _run(
    attend_current: bool, op: Callable[..., tuple[Tensor, Tensor]], inputs: OpInputs, segments: Segments | None,
    options: Mapping[str, Any],
) -> tuple[Tensor, Tensor]:
    given, mask = masked(inputs, segments, options)
    return op(*given, mask, attend_current=attend_current)


CASES: tuple[OpCase, ...] = tuple(
    OpCase(
        "stick_breaking", name, partial(draw, 4, 3, ()), options, {"head_dim": 4, "v_dim": 3},
        zero_at_pads=False,  # of a pad's stick all is left
        run=partial(_run, attend_current),
    )
    for name, attend_current, options in (
        ("earlier keys", False, {}), ("own key too", True, {}), ("window", False, {"window": 3}),
    )
)
