"""Calls of ``gather_attention`` for the contract kit: shared choices, choices of key heads, few and many of them."""

from __future__ import annotations

import functools

import torch

from hybridtf.core.op_cases import OpCase, OpInputs, randn


def _draw(h: int, g: int, c: int, n: int, reach: int, beside: bool, gen: torch.Generator, b: int, t: int) -> OpInputs:
    ranks = torch.rand(b, t, c, max(reach, n), generator=gen, dtype=torch.float64).argsort(-1)
    index = torch.where(torch.rand(b, t, c, n, generator=gen) < 0.2, -1, ranks[..., :n])
    given = {"q": randn(gen, b, t, h, 5), "k": randn(gen, b, t, g, 5), "v": randn(gen, b, t, g, 3), "index": index}
    return OpInputs({**given, "outside": randn(gen, b, t, h)} if beside else given)


def _case(name: str, h: int, g: int, c: int, n: int, reach: int = 12, *, beside: bool = False) -> OpCase:
    sizes = {"n_heads": h, "n_kv_heads": g, "head_dim": 5, "v_dim": 3}
    draw = functools.partial(_draw, h, g, c, n, reach, beside)
    return OpCase("gather_attention", name, draw, sizes=sizes, zero_at_pads=not beside)


CASES: tuple[OpCase, ...] = (
    _case("all heads share choices", 4, 2, 1, 5),
    _case("key heads choose", 4, 2, 2, 5),
    _case("one key head, one choice", 3, 1, 1, 1, reach=4),
    _case("more choices than tokens", 2, 2, 2, 40, reach=40),
    _case("none to choose from", 2, 1, 1, 0),
    _case("beside something else", 4, 2, 1, 5, beside=True),
    _case("key heads choose beside something else", 4, 2, 2, 5, beside=True),
    _case("none beside something else", 2, 1, 1, 0, beside=True),
)
