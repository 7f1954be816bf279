"""Calls of ``slstm`` for the contract kit: one head and two, gates of a usual size and large ones."""

from __future__ import annotations

import torch

from hybridtf.core.op_cases import OpCase, OpInputs, randn
from hybridtf.ops.slstm.shapes import STATES


def _draw(heads: int, spread: float, gen: torch.Generator, b: int, t: int) -> OpInputs:
    x, weight = randn(gen, b, t, heads, 12) * spread, randn(gen, heads, 3, 12) * 0.5
    state = {name: randn(gen, b, heads, 3) for name in STATES}
    return OpInputs({"x": x}, {"weight_hh": weight}, {**state, "n": 1 + state["n"].abs()})


def _plain(gen: torch.Generator, b: int, t: int) -> OpInputs:
    return _draw(2, 1.0, gen, b, t)


def _strong(gen: torch.Generator, b: int, t: int) -> OpInputs:
    return _draw(1, 6.0, gen, b, t)


CASES: tuple[OpCase, ...] = (
    OpCase("slstm", "plain", _plain, {"chunk_size": 4}, {"n_heads": 2, "head_dim": 3}),
    OpCase("slstm", "strong gates", _strong, {"chunk_size": 4}, {"n_heads": 1, "head_dim": 3}),
)
