"""Calls of ``wkv`` for the contract kit: ordinary keys, keys whose exponentials overflow, strong decay."""

from __future__ import annotations

import torch

from hybridtf.core.op_cases import OpCase, OpInputs, randn

C = 5


def _draw(keys: float, decay: float, gen: torch.Generator, b: int, t: int) -> OpInputs:
    timed = {"k": randn(gen, b, t, C) * keys, "v": randn(gen, b, t, C)}
    fixed = {"log_w": -randn(gen, C).abs() * decay - 0.01, "u": randn(gen, C)}
    state = (randn(gen, b, C), 1 + randn(gen, b, C).abs(), randn(gen, b, C) * keys)
    return OpInputs(timed, fixed, state)


def _plain(gen: torch.Generator, b: int, t: int) -> OpInputs:
    return _draw(1.0, 0.5, gen, b, t)


def _large(gen: torch.Generator, b: int, t: int) -> OpInputs:
    return _draw(200.0, 0.1, gen, b, t)


def _strong(gen: torch.Generator, b: int, t: int) -> OpInputs:
    return _draw(1.0, 60.0, gen, b, t)


CASES: tuple[OpCase, ...] = tuple(
    OpCase("wkv", name, draw, {"chunk_size": 4}, {"channels": C})
    for name, draw in (("plain", _plain), ("large keys", _large), ("strong decay", _strong))
)
