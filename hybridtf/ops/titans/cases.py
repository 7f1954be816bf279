"""Calls of ``titans`` for the contract kit: open mini-batches, mini-batches of one token, gates that close, deep memories."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from hybridtf.core.op_cases import OpCase, OpInputs, randn
from hybridtf.ops.titans.memory import layer_shapes

Sizes = tuple[int, int, int, int, int]


def _draw(h: int, sizes: Sizes, decay: float, gen: torch.Generator, b: int, t: int) -> OpInputs:
    n, p, m, depth, d_hidden = sizes
    timed = {name: randn(gen, b, t, h, width) for name, width in (("q", n), ("k", n), ("v", p))}
    timed["k"] = F.normalize(timed["k"], dim=-1)
    # Slow enough that no memory runs away.
    timed["theta"] = torch.sigmoid(randn(gen, b, t, h)) * 0.1 / m
    timed |= {name: -randn(gen, b, t, h).abs() * decay for name in ("log_eta", "log_a")}
    total = sum(rows * columns for rows, columns in layer_shapes(n, p, depth, d_hidden))
    count = torch.randint(m, (b,), generator=gen)
    M, S, base = (randn(gen, b, h, total) * 0.3 for _ in range(3))
    # Where a mini-batch begins, its base is the memory.
    state = {"M": M, "S": S, "base": torch.where((count == 0)[:, None, None], M, base), "n": count}
    return OpInputs(timed, {"M0": randn(gen, h, total) * 0.3}, state)


def _case(name: str, h: int, sizes: Sizes, decay: float) -> OpCase:
    n, p, m, depth, d_hidden = sizes
    options = {"mini_batch": m, "depth": depth, "d_hidden": d_hidden}
    of = {"n_heads": h, "head_dim": n, "v_dim": p, **options}
    return OpCase("titans", name, functools.partial(_draw, h, sizes, decay), options, of, chunk=m)


CASES: tuple[OpCase, ...] = (
    _case("a matrix", 2, (4, 3, 4, 1, 0), 0.3),
    _case("two layers", 2, (3, 3, 3, 2, 5), 0.3),
    _case("three layers, mini-batches of one token", 1, (2, 3, 1, 3, 4), 0.3),
    _case("gates that close", 1, (3, 2, 4, 2, 3), 6.0),
)
