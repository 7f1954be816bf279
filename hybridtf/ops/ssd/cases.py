"""Calls of ``ssd`` for the contract kit: few heads and many, groups, strong decay."""

from __future__ import annotations

import torch

from hybridtf.core.op_cases import OpCase, OpInputs, randn


def _draw(g: int, h: int, n: int, p: int, decay: float, gen: torch.Generator, b: int, t: int) -> OpInputs:
    timed = {"q": randn(gen, b, t, g, n), "k": randn(gen, b, t, g, n), "v": randn(gen, b, t, h, p)}
    timed["log_a"] = -randn(gen, b, t, h).abs() * decay
    return OpInputs(timed, state=randn(gen, b, h, n, p))


def _plain(gen: torch.Generator, b: int, t: int) -> OpInputs:
    return _draw(2, 2, 5, 3, 1.5, gen, b, t)


def _grouped(gen: torch.Generator, b: int, t: int) -> OpInputs:
    return _draw(2, 6, 4, 3, 0.3, gen, b, t)


def _strong(gen: torch.Generator, b: int, t: int) -> OpInputs:
    return _draw(1, 2, 3, 4, 60.0, gen, b, t)


CASES: tuple[OpCase, ...] = tuple(
    OpCase("ssd", name, draw, {"chunk_size": 4}, {"n_groups": g, "n_heads": h, "d_state": n, "head_dim": p})
    for name, draw, (g, h, n, p) in (
        ("plain", _plain, (2, 2, 5, 3)), ("grouped", _grouped, (2, 6, 4, 3)), ("strong decay", _strong, (1, 2, 3, 4)),
    )
)
