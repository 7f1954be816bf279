"""Calls of ``selective_scan`` for the contract kit: one group and several, with and without D."""

from __future__ import annotations

import torch

from hybridtf.core.op_cases import OpCase, OpInputs, randn


def _draw(c: int, g: int, n: int, with_D: bool, gen: torch.Generator, b: int, t: int) -> OpInputs:
    timed = {
        "x": randn(gen, b, t, c), "dt": randn(gen, b, t, c).abs(), "B": randn(gen, b, t, g, n), "C": randn(gen, b, t, g, n),
    }
    fixed = {"A": -randn(gen, c, n).abs()}
    return OpInputs(timed, fixed | ({"D": randn(gen, c)} if with_D else {}), randn(gen, b, c, n))


def _plain(gen: torch.Generator, b: int, t: int) -> OpInputs:
    return _draw(3, 1, 5, True, gen, b, t)


def _grouped(gen: torch.Generator, b: int, t: int) -> OpInputs:
    return _draw(6, 2, 3, False, gen, b, t)


CASES: tuple[OpCase, ...] = (
    OpCase("selective_scan", "plain", _plain, {"chunk_size": 4}, {"channels": 3, "d_state": 5, "n_groups": 1}),
    OpCase("selective_scan", "grouped", _grouped, {"chunk_size": 4}, {"channels": 6, "d_state": 3, "n_groups": 2}),
)
