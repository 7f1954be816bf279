"""Calls of ``dplr`` for the contract kit: a decay for each channel, one a head, strong decay, the delta rule."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hybridtf.core.op_cases import OpCase, OpInputs, randn

H, K, P = 2, 5, 3


def _draw(width: int, decay: float, gen: torch.Generator, b: int, t: int) -> OpInputs:
    timed = {name: randn(gen, b, t, H, K) for name in ("q", "k", "u", "r")}
    timed["u"], timed["r"] = (F.normalize(timed[name], dim=-1) for name in ("u", "r"))
    timed["v"] = randn(gen, b, t, H, P)
    timed["log_w"] = -randn(gen, b, t, H, width).abs() * decay
    return OpInputs(timed, state=randn(gen, b, H, K, P))


def _vector(gen: torch.Generator, b: int, t: int) -> OpInputs:
    return _draw(K, 1.0, gen, b, t)


def _scalar(gen: torch.Generator, b: int, t: int) -> OpInputs:
    return _draw(1, 0.5, gen, b, t)


def _strong(gen: torch.Generator, b: int, t: int) -> OpInputs:
    return _draw(K, 80.0, gen, b, t)


def _delta(gen: torch.Generator, b: int, t: int) -> OpInputs:
    inputs = _draw(K, 0.1, gen, b, t)
    timed = dict(inputs.timed)
    key = F.normalize(timed["k"], dim=-1)
    return OpInputs({**timed, "k": key, "u": -2 * key, "r": key * timed["log_w"].exp()}, state=inputs.state)


CASES: tuple[OpCase, ...] = tuple(
    OpCase("dplr", name, draw, {"chunk_size": 4}, {"n_heads": H, "head_dim": P, "d_state": K})
    for name, draw in (("vector decay", _vector), ("scalar decay", _scalar), ("strong decay", _strong), ("delta rule", _delta))
)
