"""Inputs and comparisons for the tests of ``rnn``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.rnn import GATES, STATES, rnn_fused, rnn_reference

CELLS = tuple(GATES)
OPS = (rnn_reference, rnn_fused)


def inputs(
    seed: int, cell: str, b: int, t: int, d: int = 4, h: int = 3, *, bias: bool = True, project: bool = True,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """Arguments of the op by name; the state's tensors lie under ``initial_state``."""
    gen = torch.Generator().manual_seed(seed)
    rows = len(GATES[cell]) * h

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, dtype=torch.float64).mul(0.7).to(dtype).requires_grad_()

    made: dict[str, Any] = {"x": leaf(b, t, d if project else rows), "weight_hh": leaf(rows, h)}
    if project:
        made["weight_ih"] = leaf(rows, d)
    if bias:
        made |= {"bias_hh": leaf(rows), **({"bias_ih": leaf(rows)} if project else {})}
    return {**made, "initial_state": {name: leaf(b, h) for name in STATES[cell]}, "cell": cell}


def leaves(given: dict[str, Any]) -> list[Tensor]:
    return [z for z in given.values() if isinstance(z, Tensor)] + list(given["initial_state"].values())


def grads(y: Tensor, state: dict[str, Tensor], given: dict[str, Any]) -> list[Tensor]:
    gen = torch.Generator().manual_seed(11)
    loss = torch.zeros((), dtype=y.dtype)
    for z in (y, *state.values()):
        loss = loss + (z * torch.randn(z.shape, generator=gen, dtype=z.dtype)).sum()
    found = torch.autograd.grad(loss, leaves(given), allow_unused=True)
    return [torch.zeros_like(a) if f is None else f for a, f in zip(leaves(given), found, strict=True)]


def assert_same(given: dict[str, Any], first: Any, second: Any, tol: float = 1e-12) -> None:
    assert first[1].keys() == second[1].keys()
    for a, b in zip((first[0], *first[1].values()), (second[0], *second[1].values()), strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)
    for a, b in zip(grads(*first, given), grads(*second, given), strict=True):
        torch.testing.assert_close(a, b, rtol=10 * tol, atol=10 * tol)


def alone(given: dict[str, Any], segments: Segments) -> tuple[Tensor, dict[str, Tensor]]:
    """Every document of every row through the plain recurrence by itself, and the state of each row's last one."""
    x, start = given["x"], given["initial_state"]
    rest = {k: v for k, v in given.items() if k not in ("x", "initial_state")}
    y = x.new_zeros(*x.shape[:2], given["weight_hh"].shape[1])
    states: list[dict[str, Tensor]] = []
    for row in range(len(x)):
        state = {k: v[row : row + 1] for k, v in start.items()}
        ids = segments.ids[row]
        for i, doc in enumerate(sorted(set(ids.tolist()) - {0})):
            at = (ids == doc).nonzero()[:, 0]
            own = state if i == 0 and segments.continues[row] else None
            part, state = rnn_reference(x[row : row + 1, at], initial_state=own, **rest)
            y = y.index_put((torch.tensor(row), at), part[0])
        states.append(state)
    return y, {k: torch.cat([state[k] for state in states]) for k in start}
