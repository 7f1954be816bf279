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


def _stabilised(g: int, h: int, spread: float, gen: torch.Generator, b: int, t: int) -> OpInputs:
    """Gates of any size: ``spread`` of the logarithms of what is written."""
    timed = {"q": randn(gen, b, t, g, 5), "k": randn(gen, b, t, g, 5), "v": randn(gen, b, t, h, 3)}
    timed["log_f"] = torch.nn.functional.logsigmoid(2 * randn(gen, b, t, h) + 1)
    timed["log_i"] = randn(gen, b, t, h) * spread
    return OpInputs(timed, state={"S": randn(gen, b, h, 5, 4), "m": randn(gen, b, h)})


def _calm(gen: torch.Generator, b: int, t: int) -> OpInputs:
    return _stabilised(2, 2, 1.0, gen, b, t)


def _wild(gen: torch.Generator, b: int, t: int) -> OpInputs:
    return _stabilised(1, 2, 8.0, gen, b, t)


def _trapezoid(gen: torch.Generator, b: int, t: int) -> OpInputs:
    timed = {"q": randn(gen, b, t, 2, 5), "k": randn(gen, b, t, 2, 5), "v": randn(gen, b, t, 4, 3)}
    timed |= {"log_a": -randn(gen, b, t, 4).abs(), "beta": randn(gen, b, t, 4), "gamma": randn(gen, b, t, 4)}
    return OpInputs(timed, state={"S": randn(gen, b, 4, 5, 3), "k": randn(gen, b, 2, 5), "v": randn(gen, b, 4, 3)})


_SIZES = ("n_groups", "n_heads", "d_state", "head_dim")

CASES: tuple[OpCase, ...] = tuple(
    OpCase(op, name, draw, {"chunk_size": 4, **options}, dict(zip(_SIZES, sizes, strict=True)))
    for op, name, draw, options, sizes in (
        ("ssd", "plain", _plain, {}, (2, 2, 5, 3)), ("ssd", "grouped", _grouped, {}, (2, 6, 4, 3)),
        ("ssd", "strong decay", _strong, {}, (1, 2, 3, 4)),
        # A large eps, so that what hangs on the maximum itself is seen, and float32 not lost where a denominator is near 0.
        ("ssd_stabilised", "plain", _calm, {"eps": 0.3}, (2, 2, 5, 3)),
        ("ssd_stabilised", "strong gates, grouped", _wild, {"eps": 0.3}, (1, 2, 5, 3)),
        ("ssd_trapezoid", "plain", _trapezoid, {}, (2, 4, 5, 3)),
    )
)
