"""Calls of ``state_space`` for the contract kit: real, complex and dense systems."""

from __future__ import annotations

from typing import Any

import torch

from hybridtf.core.op_cases import OpCase, OpInputs, randn

C, N = 3, 4


def _inputs(gen: torch.Generator, b: int, t: int, pair: bool, fixed: dict[str, Any]) -> OpInputs:
    def number(*shape: int) -> Any:
        return (randn(gen, *shape), randn(gen, *shape)) if pair else randn(gen, *shape)

    return OpInputs({"u": randn(gen, b, t, C)}, {"b": number(C, N), "c": number(C, N), **fixed}, number(b, C, N))


def _real(gen: torch.Generator, b: int, t: int) -> OpInputs:
    return _inputs(gen, b, t, False, {"log_a": -randn(gen, C, N).abs()})


def _complex(gen: torch.Generator, b: int, t: int) -> OpInputs:
    return _inputs(gen, b, t, True, {"log_a": (-randn(gen, C, N).abs() * 0.3, randn(gen, C, N) * 3)})


def _strong(gen: torch.Generator, b: int, t: int) -> OpInputs:
    return _inputs(gen, b, t, True, {"log_a": (-randn(gen, C, N).abs() * 300, randn(gen, C, N) * 30)})


def _dense(gen: torch.Generator, b: int, t: int) -> OpInputs:
    return _inputs(gen, b, t, False, {"a": randn(gen, C, N, N) * 0.4})


CASES: tuple[OpCase, ...] = tuple(
    OpCase("state_space", name, draw, {"chunk_size": 4}, {"channels": C, "d_state": N}, features)
    for name, draw, features in (
        ("real", _real, frozenset[str]()), ("complex", _complex, frozenset({"complex"})),
        ("strong decay", _strong, frozenset({"complex"})), ("dense", _dense, frozenset({"dense"})),
    )
)
