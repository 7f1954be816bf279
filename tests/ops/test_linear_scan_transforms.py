"""``linear_scan_chunked`` under what rewrites functions: the compiler, ``torch.func``, checkpointing, counters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from hybridtf.core import KernelError, Segments
from hybridtf.cost.flops import CountWork
from hybridtf.ops.linear_scan import chunked, linear_scan_chunked, linear_scan_reference, linear_scan_summary
from tests.ops.linear_scan_cases import FORMS, Inputs, assert_same, call, grads, inputs, number
from tests.ops.operators import arguments, check_operators
from tests.ops.ssd_cases import random_segments

LENGTHS = [5, 16, 33, 200, 2, 3]


# One of each of real, complex, log, timeless; the others take a minute more.
SOME = [pytest.param(form, marks=() if form in (FORMS[2], FORMS[5]) else pytest.mark.slow, id=str(form)) for form in FORMS]


def documents(t: int, b: int = 2) -> Segments:
    """Two documents a row and a left pad."""
    ids = torch.arange(t).ge(t // 2).to(torch.int64).add(1).repeat(b, 1)
    ids[0, :1] = 0
    return Segments.from_ids(ids, continues=True)


def compile_and_compare(backend: str, dynamic: bool, packed: bool, form, lengths: list[int]) -> int:
    """Values and gradients at every length against the reference; how often the compiler had to start."""
    counter = CompileCounterWithBackend(backend)
    n = 2 if form[0] else 1

    def run(*leaves: Tensor, segments: Segments | None):
        return call(linear_scan_chunked, Inputs(leaves[:n], leaves[n : 2 * n], leaves[2 * n :], form[1]), segments=segments)

    compiled = torch.compile(run, backend=counter, fullgraph=True, dynamic=dynamic)
    for t in lengths:
        x = inputs(t, 2, t, 2, 3, pair=form[0], log=form[1], timeless=form[2])
        segments = documents(t) if packed else None
        assert_same(x, compiled(*x.leaves, segments=segments), call(linear_scan_reference, x, segments=segments))
    return counter.frame_count


@pytest.mark.parametrize(
    ("backend", "packed", "form"),
    [
        ("eager", False, FORMS[2]), ("eager", True, FORMS[6]), ("eager", True, FORMS[1]),
        *[pytest.param("aot_eager", True, form, marks=pytest.mark.slow) for form in (FORMS[2], FORMS[7])],
    ],
)
def test_one_graph_for_many_lengths(backend: str, packed: bool, form) -> None:
    assert compile_and_compare(backend, True, packed, form, LENGTHS) <= 2


@pytest.mark.parametrize("form", SOME)
def test_one_graph_of_fixed_shapes(form) -> None:
    assert compile_and_compare("aot_eager", False, form[2], form, [37]) == 1
    assert compile_and_compare("eager", False, True, form, [1]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_inductor(form) -> None:
    assert compile_and_compare("inductor", True, True, form, LENGTHS) <= 2


def test_one_tensor_in_two_places_compiles() -> None:
    x = -torch.rand(2, 9, 3, dtype=torch.float64)
    compiled = torch.compile(lambda y: linear_scan_chunked(y, y)[0], backend="aot_eager", fullgraph=True)
    found = []
    for run in (compiled, lambda y: linear_scan_reference(y, y)[0]):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        found.append((y, *torch.autograd.grad(y.sum(), leaf)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_gradients(dynamic: bool) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda u, d, s: (linear_scan_chunked(u, d, segments=s), linear_scan_summary(u, d, segments=s)),
        backend=counter, fullgraph=True, dynamic=dynamic,
    )
    with torch.no_grad():
        for t in [40, 41, 90] if dynamic else [40]:
            u, d, s = torch.randn(2, t, 3), -torch.rand(2, t, 3), documents(t)
            (h, last), summary = compiled(u, d, s)
            want = (*linear_scan_reference(u, d, segments=s), *linear_scan_summary(u, d, segments=s))
            for a, b in zip((h, last, *summary), want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("form", SOME)
@pytest.mark.parametrize("t", [0, 20])
def test_the_operators_are_well_formed(form, t: int) -> None:
    x = inputs(0, 2, t, pair=form[0], log=form[1], timeless=form[2]).map(Tensor.detach)
    segments = documents(t) if t > 2 else None
    given = arguments((*(*x.u, None)[:2], *(*x.decay, None)[:2]), segments, (form[1],))
    check_operators(chunked._OP, given, x.state, by_result=True)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("t", [1, 20])
def test_torch_func(form, t: int) -> None:
    x = inputs(3, 2, t, pair=form[0], log=form[1], timeless=form[2]).map(Tensor.detach)
    n, segments = len(x.u), random_segments(3, 2, t)

    def loss(op, *leaves: Tensor) -> Tensor:
        given = Inputs(leaves[:n], leaves[n : 2 * n], leaves[2 * n :], x.log)
        return sum(y.square().sum() for y in call(op, given, segments=segments))

    places = tuple(range(1, len(x.leaves) + 1))
    found, expected = (torch.func.grad(loss, places)(op, *x.leaves) for op in (linear_scan_chunked, linear_scan_reference))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pair", [False, True])
def test_checkpointing(pair: bool) -> None:
    x, segments = inputs(3, 2, 20, pair=pair), random_segments(3, 2, 20)
    saved = checkpoint(lambda: call(linear_scan_chunked, x, segments=segments), use_reentrant=False)
    plain = call(linear_scan_chunked, x, segments=segments)
    for a, b in zip([*saved, *grads(saved, x)], [*plain, *grads(plain, x)], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("pair", [False, True])
def test_second_derivatives_are_refused_not_wrong(pair: bool) -> None:
    x = inputs(0, 1, 9, pair=pair)
    h = call(linear_scan_chunked, x)[0]
    first = torch.autograd.grad(h.square().sum(), x.leaves, create_graph=True)
    expected = torch.autograd.grad(call(linear_scan_reference, x)[0].square().sum(), x.leaves)
    for a, b in zip(first, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    for grad in first:
        with pytest.raises(KernelError, match="no second derivatives"):
            torch.autograd.grad(grad.sum(), x.u[0], retain_graph=True)


def test_operations_are_counted() -> None:
    for pair, log, timeless in FORMS:
        each = {(False, False): (2, 3), (False, True): (2, 4), (True, False): (8, 14), (True, True): (8, 20)}[pair, log]
        x = inputs(0, 2, 20, 5, pair=pair, log=log, timeless=timeless)
        with CountWork() as first:
            h, _ = linear_scan_chunked(number(x.u), **{"log_a" if log else "a": number(x.decay)})
        with CountWork() as second:
            torch.autograd.grad(sum(y.sum() for y in (h if pair else (h,))), x.leaves[: 2 * len(x.u)])
        useful, computed = ([getattr(one.parts["forward"], kind) for one in (first, second)] for kind in ("useful", "flops"))
        assert useful == [2 * 20 * 5 * n for n in each]
        assert all(a < b for a, b in zip(useful, computed, strict=True))  # the second sweep, and the factors
