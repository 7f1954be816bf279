"""Calls of ``log_linear`` for the contract kit: groups, strong decay, and fewer levels than the tokens would fill."""

from __future__ import annotations

import torch

from hybridtf.core.op_cases import OpCase, OpInputs, randn


def _draw(
    sizes: tuple[int, int, int, int, int], decay: float, gen: torch.Generator, b: int, t: int
) -> OpInputs:
    g, h, n, p, levels = sizes
    timed = {"q": randn(gen, b, t, g, n), "k": randn(gen, b, t, g, n), "v": randn(gen, b, t, h, p)}
    timed["log_a"] = -randn(gen, b, t, h).abs() * decay
    timed["level_scales"] = randn(gen, b, t, h, levels)
    count = torch.randint(1, 12, (b,), generator=gen)
    return OpInputs(timed, state=(randn(gen, b, levels - 1, h, n, p), count))


def _case(name: str, sizes: tuple[int, int, int, int, int], decay: float) -> OpCase:
    g, h, n, p, levels = sizes
    known = {"n_groups": g, "n_heads": h, "d_state": n, "head_dim": p, "n_levels": levels}
    return OpCase("log_linear", name, lambda gen, b, t: _draw(sizes, decay, gen, b, t), {"chunk_size": 4}, known)


CASES: tuple[OpCase, ...] = (
    _case("plain", (2, 2, 3, 2, 7), 0.5), _case("grouped, strong decay", (1, 3, 2, 3, 6), 60.0),
    _case("few levels", (1, 2, 2, 2, 3), 0.3),
)
