"""Calls of ``gated_delta_rule`` for the contract kit: decays of each kind, groups, sub-steps, rates up to 2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

from hybridtf.core.op_cases import OpCase, OpInputs, randn

Decay = Literal["none", "head", "channel"]


def _draw(
    g: int, h: int, k: int, p: int, decay: Decay, strength: float, steps: int, low: float, high: float,
    gen: torch.Generator, b: int, t: int,
) -> OpInputs:
    sub = () if steps == 1 else (steps,)
    timed = {
        "q": randn(gen, b, t, g, k), "k": F.normalize(randn(gen, b, t, *sub, g, k), dim=-1), "v": randn(gen, b, t, *sub, h, p),
        "beta": low + (high - low) * randn(gen, b, t, *sub, h).sigmoid(),
    }
    if decay != "none":
        timed["log_a"] = -randn(gen, *((b, t, h) if decay == "head" else (b, t, h, k))).abs() * strength
    return OpInputs(timed, state=randn(gen, b, h, k, p))


def _case(
    name: str, g: int, h: int, k: int, p: int, decay: Decay = "head", strength: float = 0.5, steps: int = 1,
    rates: tuple[float, float] = (0.0, 1.0), chunk_size: int = 4,
) -> OpCase:
    draw: Callable[[torch.Generator, int, int], OpInputs] = partial(_draw, g, h, k, p, decay, strength, steps, *rates)
    sizes = {"n_heads": h, "n_key_heads": g, "key_dim": k, "head_dim": p, "n_steps": steps}
    features = frozenset({"channel_decay"} if decay == "channel" else ())
    return OpCase("gated_delta_rule", name, draw, {"chunk_size": chunk_size}, sizes, features)


CASES: tuple[OpCase, ...] = (
    _case("plain", 2, 2, 5, 3),
    _case("no decay", 1, 2, 4, 3, decay="none"),
    _case("groups", 2, 6, 3, 4),
    _case("rates near 2", 2, 2, 4, 3, strength=0.05, rates=(1.8, 2.0)),
    _case("strong decay", 1, 2, 3, 4, strength=60.0),
    _case("channel decay", 1, 2, 5, 3, decay="channel", chunk_size=6),
    _case("strong channel decay", 2, 2, 3, 2, decay="channel", strength=60.0),
    _case("sub-steps", 1, 2, 4, 3, steps=3, rates=(0.0, 2.0), chunk_size=12),
    _case("sub-steps, channel decay", 1, 2, 3, 2, decay="channel", steps=2, chunk_size=8),
)
