"""Comparing tensors and states: what has to be equal, and by how much it is not.

Axes: b batch, t time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridtf.core import Growing, Ring, State, StateLeaf, leaves
from hybridtf.testing.errors import ContractError


def close(got: Tensor, want: Tensor, *, tol: float, what: str) -> None:
    """Fail unless ``got`` is finite and its largest error within ``tol`` of the size of ``want`` (1 at least)."""
    if got.shape != want.shape:
        raise ContractError(f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    if not got.numel():
        return
    finite(got, what)
    scale = 1.0 + float(want.detach().abs().max())
    error = float((got.detach() - want.detach()).abs().max())
    if not error <= tol * scale:
        raise ContractError(f"{what}: max error {error:.2e} (allowed {tol * scale:.1e})")


def close_tokens(got: Tensor, want: Tensor, *, tol: float, what: Callable[[int], str]) -> None:
    """:func:`close` for each token (t ...) with the size of its own; ``what(t)`` says which one fails."""
    if got.shape == want.shape and got.numel():
        sizes, errors = (v.detach().abs().flatten(1).amax(1) for v in (want, got.detach() - want.detach()))
        if bool((errors <= tol * (1.0 + sizes)).all()):  # false for NaN; a difference with infinity is never small
            return
    for t in range(max(got.shape[0], want.shape[0])):
        close(got[t : t + 1], want[t : t + 1], tol=tol, what=what(t))


def finite(value: Tensor, what: str) -> None:
    """Fail on NaN or infinity."""
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        bad = (~torch.isfinite(value)).nonzero()[0].tolist()
        raise ContractError(f"{what}: not finite at index {bad}")


def row_tensors(state: State, row: int) -> list[tuple[str, Tensor]]:
    """What one row of a state holds, in a form that does not depend on buffers: tokens in order, no spare slots.

    A ring gives the ``window - 1`` tokens that a next token can see.
    """
    out = []
    for i, leaf in enumerate(leaves(state)):
        name = f"leaf {i} ({type(leaf).__name__})"
        out.append((f"{name}.length", leaf.length[row]))
        for key, value in leaf.data.items():
            out.append((f"{name}[{key!r}]", _row(leaf, value[row], row)))
    return out


def _row(leaf: StateLeaf, value: Tensor, row: int) -> Tensor:
    length = int(leaf.length[row])
    if isinstance(leaf, Growing):
        return value[: int(leaf.count[row])]
    if isinstance(leaf, Ring):
        first = max(0, length - leaf.window + 1)
        if int(leaf.oldest[row]) > first:
            raise ContractError(f"a ring with window {leaf.window} has forgotten position {first} at length {length}")
        return value[torch.arange(first, length, device=value.device) % leaf.capacity]
    return value


def close_rows(got: State, row: int, want: State, want_row: int, *, tol: float, what: str) -> None:
    """Fail unless row ``row`` of ``got`` holds what row ``want_row`` of ``want`` holds."""
    ours, theirs = row_tensors(got, row), row_tensors(want, want_row)
    if len(ours) != len(theirs):
        raise ContractError(f"{what}: {len(ours)} tensors in the state, expected {len(theirs)}")
    for (name, a), (_, b) in zip(ours, theirs, strict=True):
        if name.endswith(".length") and int(a) != int(b):
            raise ContractError(f"{what}: {name} is {int(a)}, expected {int(b)} real tokens of the row's last document")
        close(a, b, tol=tol, what=f"{what}: state {name}")


def close_states(got: State, want: State, *, tol: float, what: str) -> None:
    """Fail unless both states hold the same in every row."""
    for row in range(leaves(want)[0].batch_size if leaves(want) else 0):
        close_rows(got, row, want, row, tol=tol, what=f"{what}, row {row}")


def probe_state(state: State, rows: list[int] | None = None) -> Tensor:
    """A number that depends on all that the rows hold, for gradients through a state."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf_rows in range(leaves(state)[0].batch_size if leaves(state) else 0) if rows is None else rows:
        for i, (_, value) in enumerate(row_tensors(state, leaf_rows)):
            if value.is_floating_point() and value.numel():
                generator = torch.Generator().manual_seed(1000 + i)
                weight = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
                total = total + (weight * value).sum()
    return total


def gradients(loss: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """d loss / d tensors, zero where there is no path and for parameters that are not learned by gradient."""
    asked = [t for t in tensors if t.requires_grad]
    if not loss.requires_grad or not asked:
        return [torch.zeros_like(t) for t in tensors]
    found = iter(torch.autograd.grad(loss, asked, allow_unused=True))
    grads = [next(found) if t.requires_grad else None for t in tensors]
    return [torch.zeros_like(t) if g is None else g for g, t in zip(grads, tensors, strict=True)]


def storages(tensors: list[Tensor]) -> set[int]:
    """Addresses of the memory behind tensors."""
    return {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
