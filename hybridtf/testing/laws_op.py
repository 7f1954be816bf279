"""Laws of a kernel as a function: equal to the op's reference, and the same laws of time and documents as a mixer.

Axes: b batch, t time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from hybridtf.core import OpCase, OpInputs, Segments
from hybridtf.testing.compare import close
from hybridtf.testing.errors import ContractError
from hybridtf.testing.op_calls import (
    LAYOUTS,
    Op,
    at_real,
    call,
    documents,
    draw,
    gradients,
    named_inputs,
    named_results,
    same,
    tensors,
)

EXACT = ((torch.float64, 1e-9), (torch.float32, 3e-4))
"""The dtypes that a kernel must agree in, and how nearly."""


def check_over_time(case: OpCase, op: Op, reference: Op, dtype: torch.dtype, tol: float) -> None:
    """The laws of documents, pads, time and cuts; raises :class:`ContractError` with the first difference."""
    check_documents(case, op, reference, dtype, tol)
    check_pads(case, op, dtype)
    if case.causal:
        check_causal(case, op, dtype)
    if case.draw(torch.Generator().manual_seed(0), 1, 2).state is not None:
        check_cuts(case, op, dtype, tol)
        check_untouched(case, op, dtype)


def check_agreement(case: OpCase, op: Op, reference: Op, dtype: torch.dtype, tol: float) -> None:
    """The kernel and the reference at lengths around its chunks, with and without documents."""
    sizes = {1, 2, case.chunk - 1, case.chunk, case.chunk + 1, 2 * case.chunk + 3, 5 * case.chunk}
    for t in sorted(size for size in sizes if size > 0):
        check_call(case, op, reference, draw(case, 2, t, dtype=dtype), None, tol, f"in {dtype}, length {t}")
    for rows in LAYOUTS:
        x = draw(case, len(rows), len(rows[0]), dtype=dtype)
        check_call(case, op, reference, x, documents(rows), tol, f"in {dtype}, documents {rows}")


def check_call(
    case: OpCase, op: Op, reference: Op, x: OpInputs, segments: Segments | None, tol: float, what: str
) -> None:
    """One call agrees with the reference: results, final state, gradients of every input."""
    got, want = (_real(case, call(case, one, x, segments), segments) for one in (op, reference))
    same(case, x, got, want, tol, what)


def _real(case: OpCase, result: tuple[Any, Any], segments: Segments | None) -> tuple[Any, Any]:
    return at_real(case, result[0], segments), result[1]


def check_documents(case: OpCase, op: Op, reference: Op, dtype: torch.dtype, tol: float) -> None:
    """Documents in rows give what each gives alone, by the reference: results, final states and gradients."""
    for rows in LAYOUTS:
        segments, x = documents(rows), draw(case, len(rows), len(rows[0]), 1, dtype)
        got = _real(case, call(case, op, x, segments), segments)
        want = _alone(case, reference, x, segments, got[0])
        same(case, x, got, want, tol, f"documents alone and in rows {rows}")


def _alone(case: OpCase, op: Op, x: OpInputs, segments: Segments, like: Any) -> tuple[Any, Any]:
    ys, states = pytree.tree_map(torch.zeros_like, like), []
    for row in range(segments.ids.shape[0]):
        state = _rows(x.state, row)
        for i, document in enumerate(segments.ids[row].unique().tolist()):
            if document == 0:
                continue
            first = i == int(bool((segments.ids[row] == 0).any()))
            at = (segments.ids[row] == document).nonzero()[:, 0]
            begin = state if first and bool(segments.continues[row]) else pytree.tree_map_only(Tensor, torch.zeros_like, state)
            timed = pytree.tree_map(lambda z, row=row, at=at: z[row : row + 1, at], dict(x.timed))
            y, state = call(case, op, OpInputs(timed, x.fixed, begin))
            where = (torch.tensor(row), at)
            ys = pytree.tree_map(lambda whole, part, where=where: whole.index_put(where, part[0]), ys, y)
        states.append(state)
    return ys, None if x.state is None else pytree.tree_map(lambda *z: torch.cat(z), *states)


def _rows(tree: Any, row: int) -> Any:
    return pytree.tree_map_only(Tensor, lambda z: z[row : row + 1], tree)  # None is a tree too: an op without a state


def check_cuts(case: OpCase, op: Op, dtype: torch.dtype, tol: float) -> None:
    """Cut anywhere and carried on by the state, a call gives what one call gives, with its gradients."""
    for rows in (None, LAYOUTS[3]):
        segments = None if rows is None else documents(rows)
        x = draw(case, 3, 19, 2, dtype)
        whole = _real(case, call(case, op, x, segments), segments)
        for cuts in _cuts(case, 19):
            parts, state = [], x.state
            for start, stop in zip((0, *cuts), (*cuts, 19), strict=True):
                timed = pytree.tree_map(lambda z, s=start, e=stop: z[:, s:e], dict(x.timed))
                part = None if segments is None else segments.narrow(start, stop)
                y, state = call(case, op, OpInputs(timed, x.fixed, state), part)
                parts.append(y)
            joined = pytree.tree_map(lambda *z: torch.cat(z, 1), *parts)
            same(case, x, (at_real(case, joined, segments), state), whole, tol, f"cut at {cuts} (documents {rows})")


def _cuts(case: OpCase, t: int) -> Iterator[tuple[int, ...]]:
    yield tuple(range(1, t))
    yield from ((1,), (t - 1,), (case.chunk,), (case.chunk + 1, 2 * case.chunk + 1), (5, 5, 6))


def check_pads(case: OpCase, op: Op, dtype: torch.dtype) -> None:
    """What pads and dropped states hold has no effect, not even NaN, and pads are zero in the result."""
    for rows in LAYOUTS[1:3]:
        segments, x = documents(rows), draw(case, 3, len(rows[0]), 3, dtype)
        pads, dropped = ~segments.real, ~segments.continues & (segments.last_id > 0)

        def spoil(z: Any, where: Tensor, value: float) -> Any:
            if not z.is_floating_point():
                return z
            return z.detach().masked_fill(where.view(*where.shape, *[1] * (z.ndim - where.ndim)), value).requires_grad_()

        clean = _real(case, call(case, op, x, segments), segments)
        for value in (float("nan"), float("inf"), -1e30):
            timed = pytree.tree_map(lambda z, v=value, w=pads: spoil(z, w, v), dict(x.timed))
            state = None if x.state is None else pytree.tree_map(lambda z, v=value, w=dropped: spoil(z, w, v), x.state)
            dirty = OpInputs(timed, x.fixed, state)
            _same_in_spite(case, (x, clean), (dirty, _real(case, call(case, op, dirty, segments), segments)), value, rows)
        if case.zero_at_pads and any(bool(z[pads].any()) for z in tensors(clean[0])):
            raise ContractError(f"{case.op} ({case.name}): y is not zero at pads")


def _same_in_spite(case: OpCase, clean: tuple[OpInputs, Any], dirty: tuple[OpInputs, Any], value: float, rows: Any) -> None:
    """Results and gradients do not know what stands at pads."""
    found = []
    for x, result in (dirty, clean):
        results = named_results(*result)
        grads = zip(named_inputs(x), gradients([z for _, z in results], x), strict=True)
        found.append([*results, *((f"gradient of {name}", grad) for (name, _), grad in grads)])
    for (name, a), (_, b) in zip(*found, strict=True):
        close(a, b, tol=1e-12, what=f"{case.op} ({case.name}) with {value} at pads {rows}: {name}")


def check_causal(case: OpCase, op: Op, dtype: torch.dtype) -> None:
    """No result depends on a later token."""
    t = 4 * case.chunk + 1
    x = draw(case, 1, t, 4, dtype)
    at = t // 2
    y, _ = call(case, op, x)
    early = [z[:, : at + 1] for z in tensors(y)]
    timed = named_inputs(x._replace(fixed={}, state=None))
    total = torch.stack([z.square().sum() for z in early]).sum()
    found = torch.autograd.grad(total, [z for _, z in timed], allow_unused=True, materialize_grads=True)
    for (name, _), grad in zip(timed, found, strict=True):
        if bool(grad[:, at + 1 :].any()):
            raise ContractError(f"{case.op} ({case.name}): results up to {at} depend on later tokens (through {name})")


def check_untouched(case: OpCase, op: Op, dtype: torch.dtype) -> None:
    """Rows of pads, and calls of no tokens, hand their state on."""
    for t in (1, 2 * case.chunk + 1):
        x = draw(case, 2, t, 5, dtype)
        _, state = call(case, op, x, Segments.from_ids(torch.zeros(2, t, dtype=torch.int64), continues=False))
        for got, want in zip(tensors(state), tensors(x.state), strict=True):
            if not torch.equal(got, want):
                raise ContractError(f"{case.op} ({case.name}): a row of {t} pads changes its state")
    x = draw(case, 2, 0, 5, dtype)
    y, state = call(case, op, x)
    if any(z.shape[1] for z in tensors(y)):
        raise ContractError(f"{case.op} ({case.name}): no tokens give a result of some")
    for got, want in zip(tensors(state), tensors(x.state), strict=True):
        if not torch.equal(got, want):
            raise ContractError(f"{case.op} ({case.name}): a call of no tokens changes the state")
