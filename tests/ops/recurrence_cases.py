"""What tests of recurrences share: calls, gradients, comparisons, and the laws that hold for all of them.

``Inputs`` of an op are a named tuple of its tensors in the order of its arguments, the incoming state last.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hybridtf.core.errors import KernelError
from hybridtf.core.segments import Segments

Inputs = Any


def call(op, x: Inputs, **more):
    return op(*x[:-1], initial_state=x[-1], **more)


def loss(y: Tensor, state: Tensor, seed: int = 0) -> Tensor:
    """A weighted sum of both results; the weights do not depend on how they lie in memory."""
    gen = torch.Generator().manual_seed(seed)
    parts = [(z.double() * torch.randn(z.shape, generator=gen, dtype=torch.float64)).sum() for z in (y, state)]
    return parts[0] + parts[1]


def grads(y: Tensor, state: Tensor, x: Inputs, seed: int = 0) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(y, state, seed), x, allow_unused=True, materialize_grads=True)


def assert_same(x: Inputs, first, second, tol: float = 1e-10) -> None:
    """Results and all gradients."""
    for a, b in zip([*first, *grads(*first, x)], [*second, *grads(*second, x)], strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


# -- laws -----------------------------------------------------------------------------------------------------------


def check_packed(op, x: Inputs, lengths: list[int], continues: bool, alone: Callable[[Inputs, Segments], Any]) -> None:
    """Documents side by side in a row, some empty, are as each is alone."""
    segments = Segments.from_lengths([lengths], continues=continues)
    y, state = call(op, x, segments=segments, chunk_size=8)
    assert y.shape[1] == sum(lengths)
    assert_same(x, (y, state), alone(x, segments))
    if not sum(lengths):
        assert torch.equal(state, x[-1])


def check_rows_of_pads(op, x: Inputs, t: int) -> None:
    """They hand the state on, with its gradient."""
    segments = Segments.from_mask(torch.zeros(2, t), continues=torch.tensor([True, False]))
    y, state = call(op, x, segments=segments, chunk_size=4)
    assert torch.equal(state, x[-1])
    assert not y.any()
    assert torch.equal(torch.autograd.grad(state.sum(), x[-1])[0], torch.ones_like(state))


def check_content_of_pads(op, x: Inputs, segments: Segments, in_time: Sequence[int], garbage: Sequence[float]) -> None:
    """What stands at pads in the arguments ``in_time``, or in a state of another document, has no effect and no gradient."""
    if segments.ids.shape[1] == 1:
        segments = Segments.from_ids(torch.tensor([[0], [1]] * 4), continues=torch.arange(8) < 4)
    pads = ~segments.real
    dropped = ~segments.continues & (segments.last_id > 0)
    assert pads.any()
    assert dropped.any()
    with torch.no_grad():
        spoilt = [z.clone() for z in x]
        for i, value in zip(in_time, garbage, strict=True):
            spoilt[i][pads] = value
        spoilt[-1][dropped] = garbage[0]
    dirty = type(x)(*(z.requires_grad_() for z in spoilt))
    first, second = (call(op, z, segments=segments, chunk_size=8) for z in (x, dirty))
    of_first, of_second = grads(*first, x), grads(*second, dirty)
    for a, b in zip((*first, *of_first), (*second, *of_second), strict=True):
        assert torch.equal(a, b)
    for i in in_time:
        assert not of_first[i][pads].any()


def run_in_parts(
    op, x: Inputs, cuts: list[int], segments: Segments | None, chunk_size: int, in_time: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The arguments ``in_time`` cut, the state carried on."""
    state, out = x[-1], []
    for start, stop in zip([0, *cuts], [*cuts, x[0].shape[1]], strict=True):
        part = None if segments is None else segments.narrow(start, stop)
        given = [z[:, start:stop] if i in in_time else z for i, z in enumerate(x[:-1])]
        y, state = op(*given, initial_state=state, segments=part, chunk_size=chunk_size)
        out.append(y)
    return torch.cat(out, 1), state


def check_cuts(op, x: Inputs, segments: Segments | None, in_time: Sequence[int], times: int) -> None:
    """Cut anywhere, a call of 96 tokens gives the same, with its gradients, ``times`` times."""
    whole = call(op, x, segments=segments, chunk_size=16)
    expected = [*whole, *grads(*whole, x)]
    rng = random.Random(0)
    for i in range(times):
        cuts = sorted(rng.choices(range(97), k=rng.randint(1, 6)))
        parts = run_in_parts(op, x, cuts, segments, (8, 16, 32)[i % 3], in_time)
        for a, b in zip([*parts, *grads(*parts, x)], expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def assert_alike(got, want, leaves: Sequence[Tensor]) -> None:
    """What a compiled op and the op itself give, and the gradients through the first result."""
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(z[0].square().sum(), leaves) for z in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def check_torch_func(
    fast, reference, x: Inputs, segments: Segments | None, alone: Callable[[Any, Tensor], Tensor], one: Tensor
) -> None:
    """``torch.func.grad`` through all arguments, and through ``alone(op, one)``, where one tensor is several of them."""

    def whole(op, *given: Tensor) -> Tensor:
        return loss(*call(op, type(x)(*given), segments=segments, chunk_size=8))

    for f, args in ((whole, tuple(x)), (alone, (one,))):
        where = tuple(range(1, len(args) + 1))
        found, expected = (torch.func.grad(f, where)(op, *args) for op in (fast, reference))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def check_checkpointing(op, x: Inputs, segments: Segments | None) -> None:
    saved = checkpoint(op, *x[:-1], use_reentrant=False, segments=segments, chunk_size=8)
    plain = op(*x[:-1], segments=segments, chunk_size=8)
    for a, b in zip([*saved, *grads(*saved, x)], [*plain, *grads(*plain, x)], strict=True):
        assert torch.equal(a, b)


def check_second_derivatives_are_refused(fast, reference, x: Inputs, through: Tensor) -> None:
    """A graph of the gradients gives them right, and only differentiating them is refused."""
    first = torch.autograd.grad(call(fast, x, chunk_size=4)[0].square().sum(), x, create_graph=True)
    expected = torch.autograd.grad(call(reference, x)[0].square().sum(), x)
    for a, b in zip(first, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    for grad in first:
        with pytest.raises(KernelError, match="no second derivatives"):
            torch.autograd.grad(grad.sum(), through, retain_graph=True)
