"""Calls of ``linear_scan`` for the contract kit: real and complex, the factor or its logarithm, of each token or of none."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hybridtf.core.op_cases import OpCase, OpInputs, randn


def _real(decay: float, gen: torch.Generator, b: int, t: int) -> OpInputs:
    return OpInputs(
        {"u": randn(gen, b, t, 5), "log_a": -randn(gen, b, t, 5).abs() * decay}, state=randn(gen, b, 5)
    )


def _factor(gen: torch.Generator, b: int, t: int) -> OpInputs:
    """A factor of any sign."""
    return OpInputs({"u": randn(gen, b, t, 2, 3), "a": randn(gen, b, t, 2, 3).tanh()}, state=randn(gen, b, 2, 3))


def _complex(gen: torch.Generator, b: int, t: int) -> OpInputs:
    def pair(*shape: int) -> tuple[Any, Any]:
        return randn(gen, *shape), randn(gen, *shape)

    log_a = (-randn(gen, b, t, 4).abs() * 0.5, 3 * randn(gen, b, t, 4))
    return OpInputs({"u": pair(b, t, 4), "log_a": log_a}, state=pair(b, 4))


def _fixed(gen: torch.Generator, b: int, t: int) -> OpInputs:
    """A complex factor that time does not change."""
    log_a = (-randn(gen, 4).abs() * 0.2, 3 * randn(gen, 4))
    timed = {"u": (randn(gen, b, t, 4), randn(gen, b, t, 4))}
    return OpInputs(timed, {"log_a": log_a}, (randn(gen, b, 4), randn(gen, b, 4)))


CASES: tuple[OpCase, ...] = tuple(
    OpCase("linear_scan", name, draw, sizes={"channels": channels}, features=features, zero_at_pads=False)
    for name, draw, channels, features in (
        ("real", partial(_real, 1.0), 5, frozenset[str]()),
        ("strong decay", partial(_real, 60.0), 5, frozenset[str]()),
        ("a factor", _factor, 6, frozenset[str]()),
        ("complex", _complex, 4, frozenset({"complex"})),
        ("complex, the same at every token", _fixed, 4, frozenset({"complex"})),
    )
)
