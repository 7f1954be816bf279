"""Calls of ``ttt_linear`` for the contract kit: open mini-batches, mini-batches of one token, fast learning."""

from __future__ import annotations

import functools

import torch

from hybridtf.core.op_cases import OpCase, OpInputs, randn


def _draw(h: int, p: int, m: int, speed: float, gen: torch.Generator, b: int, t: int) -> OpInputs:
    timed = {name: randn(gen, b, t, h, p) for name in ("q", "k", "v")}
    timed["lr"] = torch.sigmoid(randn(gen, b, t, h)) * speed
    fixed = {"norm_weight": 1 + 0.3 * randn(gen, h, p), "norm_bias": randn(gen, h, p)}
    fixed |= {"W0": randn(gen, h, p, p), "b0": randn(gen, h, p), "scale": 1 / torch.arange(1, m + 1, dtype=torch.float64)}
    n = torch.randint(m, (b,), generator=gen)
    # A mini-batch of no tokens yet has no gradients either.
    dW = randn(gen, b, h, p + 1, p).masked_fill((n == 0)[:, None, None, None], 0)
    return OpInputs(timed, fixed, {"W": randn(gen, b, h, p + 1, p), "dW": dW, "n": n})


def _case(name: str, h: int, p: int, m: int, speed: float) -> OpCase:
    sizes = {"n_heads": h, "head_dim": p, "mini_batch": m}
    return OpCase("ttt_linear", name, functools.partial(_draw, h, p, m, speed), {"eps": 0.1}, sizes, chunk=m)


CASES: tuple[OpCase, ...] = (
    _case("plain", 2, 4, 4, 0.3),
    _case("mini-batches of one token", 2, 3, 1, 0.3),
    _case("mini-batches of three, fast", 1, 5, 3, 2.0),
)
