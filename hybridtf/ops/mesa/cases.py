"""Calls of ``mesa`` for the contract kit: weak and strong decay, more values than keys, systems far from round."""

from __future__ import annotations

import functools

import torch

from hybridtf.core.op_cases import OpCase, OpInputs, randn


def _draw(h: int, n: int, p: int, decay: float, least: float, gen: torch.Generator, b: int, t: int) -> OpInputs:
    timed = {name: randn(gen, b, t, h, width) for name, width in (("q", n), ("k", n), ("v", p))}
    timed["beta"], timed["log_a"] = torch.sigmoid(randn(gen, b, t, h)), -randn(gen, b, t, h).abs() * decay
    fixed = {"ridge": least + randn(gen, h, n).abs()}
    half = randn(gen, b, h, n, n)
    return OpInputs(timed, fixed, torch.cat([half @ half.mT / n, randn(gen, b, h, n, p)], -1))


def _case(name: str, h: int, n: int, p: int, decay: float, least: float) -> OpCase:
    sizes = {"n_heads": h, "head_dim": n, "v_dim": p}
    return OpCase("mesa", name, functools.partial(_draw, h, n, p, decay, least), {"chunk_size": 4, "n_steps": 12}, sizes)


CASES: tuple[OpCase, ...] = (
    _case("plain", 2, 3, 5, 0.3, 0.5),
    _case("strong decay", 1, 4, 2, 60.0, 0.5),
    _case("a small ridge", 1, 3, 3, 0.01, 0.1),
)
