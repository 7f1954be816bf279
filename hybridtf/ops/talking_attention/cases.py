"""Calls of ``talking_attention`` for the contract kit: heads mixed on both sides of the softmax, and on one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridtf.core.op_cases import OpCase, OpInputs, randn
from hybridtf.core.segments import Segments
from hybridtf.ops.attention.cases import HEADS, draw, masked


def _draw(mixes: tuple[str, ...], gen: torch.Generator, b: int, t: int) -> OpInputs:
    return draw(4, 3, (), gen, b, t)._replace(fixed={name: randn(gen, HEADS, HEADS) / 2 for name in mixes})


def _run(op: Callable[..., Tensor], inputs: OpInputs, segments: Segments | None, options: Mapping[str, Any]) -> Tensor:
    given, mask = masked(inputs, segments, options)
    return op(*given, mask, inputs.fixed.get("score_mix"), inputs.fixed.get("weight_mix"))


CASES: tuple[OpCase, ...] = tuple(
    OpCase("talking_attention", name, partial(_draw, mixes), options, {"head_dim": 4, "v_dim": 3}, run=_run)
    for name, mixes, options in (
        ("both mixes", ("score_mix", "weight_mix"), {}),
        ("scores alone, window", ("score_mix",), {"window": 3}),
    )
)
