"""Calls of an op, and what comes back and what flows back under the names that a message says.

Axes: b batch, t time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from hybridtf.core import OpCase, OpInputs, Segments
from hybridtf.testing.compare import close
from hybridtf.testing.errors import ContractError

Op = Callable[..., Any]

LAYOUTS = (
    ("1111122233", "1222222222", "1111111111"),
    ("0001111111", "1111111000", "0000000000"),
    ("1100102202", "0110333004", "1000000001"),
    ("2222222022222220333", "1111111111111111110", "0000111110000222222"),
    ("1", "0", "2"),
)
"""Rows of document ids, 0 for padding; every other row goes on with the document of its state."""


def documents(rows: tuple[str, ...]) -> Segments:
    """The segments of one of :data:`LAYOUTS`."""
    ids = torch.tensor([[int(c) for c in row] for row in rows])
    return Segments.from_ids(ids, continues=torch.arange(len(rows)) % 2 == 0)


def cast(x: OpInputs, change: Callable[[Tensor], Tensor]) -> OpInputs:
    """The inputs with every tensor of floating point changed."""
    changed: OpInputs = pytree.tree_map_only(
        Tensor, lambda z: change(z) if z.is_floating_point() else z, x._replace(timed=dict(x.timed), fixed=dict(x.fixed))
    )
    return changed


def draw(case: OpCase, b: int, t: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> OpInputs:
    """Inputs of a case, watched by autograd."""
    given = case.draw(torch.Generator().manual_seed(1000 * seed + t), b, t)
    return cast(given, lambda x: x.to(dtype).detach().requires_grad_())


def call(case: OpCase, op: Op, x: OpInputs, segments: Segments | None = None) -> tuple[Any, Any]:
    """(y, state) of one call, the state None where the op has none."""
    if case.run is not None:
        out = case.run(op, x, segments, dict(case.options))
    else:
        given = {} if x.state is None else {"initial_state": x.state}
        out = op(**x.timed, **x.fixed, **case.options, **given, segments=segments)
    return out if x.state is not None else (out, None)


def tensors(*trees: Any) -> list[Tensor]:
    """The tensors of floating point in results or inputs."""
    return [x for x in pytree.tree_leaves(trees) if isinstance(x, Tensor) and x.is_floating_point()]


def _named(name: str, tree: Any) -> list[tuple[str, Tensor]]:
    found = pytree.tree_flatten_with_path(tree)[0]
    return [
        (name + pytree.keystr(path), x) for path, x in found if isinstance(x, Tensor) and x.is_floating_point()
    ]


def named_inputs(x: OpInputs) -> list[tuple[str, Tensor]]:
    """What a caller gives, by the argument's name."""
    given: Mapping[str, Any] = {**x.timed, **x.fixed, "initial_state": x.state}
    return [pair for name, value in given.items() for pair in _named(name, value)]


def named_results(y: Any, state: Any) -> list[tuple[str, Tensor]]:
    """What a call gives."""
    return [*_named("y", y), *_named("the final state", state)]


def gradients(outputs: list[Tensor], x: OpInputs) -> list[Tensor]:
    """Of a weighted sum of ``outputs``, for every input."""
    total = torch.zeros((), dtype=torch.float64)
    for i, out in enumerate(outputs):
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        total = total + (out.double() * weight).sum()
    given = [z for _, z in named_inputs(x)]
    if not total.requires_grad:
        return [torch.zeros_like(z) for z in given]
    return list(torch.autograd.grad(total, given, retain_graph=True, allow_unused=True, materialize_grads=True))


def at_real(case: OpCase, y: Any, segments: Segments | None) -> Any:
    """y as a caller may read it: nothing at pads, where the op promises nothing there."""
    if segments is None or case.zero_at_pads:
        return y
    pads = ~segments.real
    return pytree.tree_map(lambda z: z.masked_fill(pads.view(*pads.shape, *[1] * (z.ndim - 2)), 0), y)


def same(case: OpCase, x: OpInputs, got: tuple[Any, Any], want: tuple[Any, Any], tol: float, what: str) -> None:
    """Results, and gradients of every input, agree."""
    what = f"{case.op} ({case.name}) {what}"
    ours, theirs = same_results(got, want, tol, what)
    found = zip(named_inputs(x), gradients(ours, x), gradients(theirs, x), strict=True)
    for (name, _), a, b in found:
        close(a, b, tol=tol, what=f"{what}: gradient of {name}")


def same_results(
    got: tuple[Any, Any], want: tuple[Any, Any], tol: float, what: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Results agree; both as lists."""
    ours, theirs = named_results(*got), named_results(*want)
    if [name for name, _ in ours] != [name for name, _ in theirs]:
        raise ContractError(f"{what}: {[name for name, _ in ours]} come back, expected {[name for name, _ in theirs]}")
    for (name, a), (_, b) in zip(ours, theirs, strict=True):
        close(a, b, tol=tol, what=f"{what}: {name}")
    return [a for _, a in ours], [b for _, b in theirs]
