"""Calls of ``gla`` for the contract kit: both ways to read, both decays, shared states, strong decay."""

from __future__ import annotations

import functools
from typing import Any

import torch

from hybridtf.core.op_cases import OpCase, OpInputs, randn


def _draw(
    g: int, h: int, n: int, p: int, strength: float, bonus: bool, values: bool, gen: torch.Generator, b: int, t: int
) -> OpInputs:
    timed = {"q": randn(gen, b, t, h, n), "k": randn(gen, b, t, g, n), "v": randn(gen, b, t, g, p)}
    timed["log_a"] = -randn(gen, b, t, g, p if values else n).abs() * strength
    return OpInputs(timed, {"bonus": randn(gen, h, n)} if bonus else {}, state=randn(gen, b, g, n, p))


def _case(
    name: str, g: int, h: int, n: int, p: int, *, strength: float = 0.5, bonus: bool = False, values: bool = False,
    chunk: int = 4,
) -> OpCase:
    options: dict[str, Any] = {"chunk_size": chunk, **({"decay": "values"} if values else {})}
    sizes = {"n_heads": h, "n_groups": g, "head_dim": n, "v_dim": p}
    draw = functools.partial(_draw, g, h, n, p, strength, bonus, values)
    return OpCase("gla", name, draw, options, sizes, chunk=chunk)


CASES: tuple[OpCase, ...] = (
    _case("read after the write", 2, 2, 5, 3),
    _case("read before it, with a bonus", 2, 2, 5, 3, bonus=True),
    _case("queries share states", 2, 4, 3, 2),
    _case("queries share states, bonus", 2, 4, 3, 2, bonus=True, chunk=8),
    _case("decay of values", 2, 4, 3, 5, values=True),
    _case("decay of values, bonus", 1, 2, 3, 4, values=True, bonus=True),
    _case("strong decay", 1, 2, 3, 4, strength=60.0),
    _case("chunks of no power of two", 1, 2, 4, 3, chunk=6),
)
