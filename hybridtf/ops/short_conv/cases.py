"""Calls of ``short_conv`` for the contract kit: with and without bias and activation, one tap and more taps than tokens."""

from __future__ import annotations

from functools import partial

import torch

from hybridtf.core.op_cases import OpCase, OpInputs, randn


def _draw(width: int, bias: bool, gen: torch.Generator, b: int, t: int) -> OpInputs:
    fixed = {"weight": randn(gen, 3, width)} | ({"bias": randn(gen, 3)} if bias else {})
    return OpInputs({"x": randn(gen, b, t, 3)}, fixed, randn(gen, b, width - 1, 3))


CASES: tuple[OpCase, ...] = (
    OpCase("short_conv", "4 taps, silu", partial(_draw, 4, True), {"activation": "silu"}, {"channels": 3, "width": 4}),
    OpCase("short_conv", "2 taps", partial(_draw, 2, False), sizes={"channels": 3, "width": 2}, chunk=2),
    OpCase("short_conv", "1 tap", partial(_draw, 1, True), sizes={"channels": 3, "width": 1}, chunk=1),
    OpCase("short_conv", "11 taps", partial(_draw, 11, True), sizes={"channels": 3, "width": 11}),
)
