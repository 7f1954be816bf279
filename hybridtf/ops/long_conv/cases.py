"""Calls of ``long_conv`` for the contract kit: filters longer than the rows, shorter, and of one tap."""

from __future__ import annotations

import functools

import torch

from hybridtf.core.op_cases import OpCase, OpInputs, randn

C = 3


def _draw(width: int, gen: torch.Generator, b: int, t: int) -> OpInputs:
    return OpInputs({"x": randn(gen, b, t, C)}, {"weight": randn(gen, C, width)})


CASES: tuple[OpCase, ...] = tuple(
    OpCase("long_conv", name, functools.partial(_draw, width), sizes={"channels": C}, chunk=chunk)
    for name, width, chunk in (("long", 200, 33), ("short", 5, 4), ("one tap", 1, 4))
)
