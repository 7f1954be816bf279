"""Calls of ``rnn`` for the contract kit: gates and none, with the input projection and without."""

from __future__ import annotations

from functools import partial

import torch

from hybridtf.core.op_cases import OpCase, OpInputs, randn
from hybridtf.ops.rnn.shapes import GATES, STATES, Cell

WIDTH = 4


def _draw(cell: Cell, d: int | None, gen: torch.Generator, b: int, t: int) -> OpInputs:
    rows = len(GATES[cell]) * WIDTH
    fixed = {"weight_hh": randn(gen, rows, WIDTH) / 2, "bias_hh": randn(gen, rows) / 2}
    if d is not None:
        fixed |= {"weight_ih": randn(gen, rows, d) / 2, "bias_ih": randn(gen, rows) / 2}
    state = {name: randn(gen, b, WIDTH).tanh() for name in STATES[cell]}
    return OpInputs({"x": randn(gen, b, t, rows if d is None else d)}, fixed, state)


_TRIED: tuple[tuple[Cell, int | None], ...] = (("relu", 3), ("lstm", 3), ("gru", 5), ("lstm", None))

CASES: tuple[OpCase, ...] = tuple(
    OpCase(
        "rnn", cell if d else f"{cell}, inputs projected before", partial(_draw, cell, d), {"cell": cell}, {"d_hidden": WIDTH},
        frozenset({cell}),
    )
    for cell, d in _TRIED
)
