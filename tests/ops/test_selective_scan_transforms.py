"""``selective_scan_chunked`` under the compiler, ``torch.func``, checkpointing, counters and double backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from hybridtf.core.segments import Segments
from hybridtf.cost.flops import CountWork
from hybridtf.ops.selective_scan import (
    chunked,
    selective_scan_chunked,
    selective_scan_reference,
    selective_scan_summary,
)
from hybridtf.ops.selective_scan.blocks import by_row
from tests.ops.operators import arguments, check_operators
from tests.ops.recurrence_cases import (
    call,
    check_checkpointing,
    check_second_derivatives_are_refused,
    check_torch_func,
    loss,
)
from tests.ops.selective_scan_cases import Inputs, inputs
from tests.ops.ssd_cases import random_segments

LENGTHS = [5, 16, 17, 64, 2, 100]


def documents(t: int, b: int = 2) -> Segments:
    """Two documents a row and a left pad."""
    ids = torch.arange(t).ge(t // 2).to(torch.int64).add(1).repeat(b, 1)
    ids[0, :1] = 0
    return Segments.from_ids(ids, continues=True)


def most_graphs(packed: bool) -> int:
    """One chunk and many differ; with documents the compiler sets two tokens apart, where a mask of starts has one pair."""
    return 3 if packed else 2


def compile_and_compare(backend: str, dynamic: bool, packed: bool, given: bool, lengths: list[int]) -> int:
    """Values and gradients at every length against the reference; how often the compiler had to start."""

    def mixed(op, x, dt, A, B, D, state, segments):
        dt = dt * 2  # something of the compiler's own around the op, which is given one tensor for B and C
        return op(x, dt, A, B, B, D, initial_state=state, segments=segments, chunk_size=16)

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda *a: mixed(selective_scan_chunked, *a), backend=counter, fullgraph=True, dynamic=dynamic)
    for t in lengths:
        z = inputs(t, 2, t)
        leaves = [z.x, z.dt, z.A, z.B, *([z.D, z.initial_state] if given else [])]
        args = (*leaves[:4], z.D if given else None, z.initial_state if given else None, documents(t) if packed else None)
        results = compiled(*args), mixed(selective_scan_reference, *args)
        found, expected = ([*out, *torch.autograd.grad(loss(*out), leaves)] for out in results)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    return counter.frame_count


@pytest.mark.parametrize(("backend", "packed", "given"), [("eager", False, False), ("aot_eager", True, True)])
def test_one_graph_for_many_lengths(backend: str, packed: bool, given: bool) -> None:
    assert compile_and_compare(backend, True, packed, given, LENGTHS) <= most_graphs(packed)


@pytest.mark.parametrize(("packed", "given"), [(False, True), (True, False)])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_of_fixed_shapes(backend: str, packed: bool, given: bool) -> None:
    assert compile_and_compare(backend, False, packed, given, [37]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor(dynamic: bool, packed: bool, given: bool) -> None:
    lengths = LENGTHS if dynamic else [37]
    assert compile_and_compare("inductor", dynamic, packed, given, lengths) <= (most_graphs(packed) if dynamic else 1)


@pytest.mark.parametrize("t", [1, 40])
def test_compiles_without_gradients(t: int) -> None:
    x, segments = Inputs(*(z.detach() for z in inputs(1, 2, t))), documents(t)
    with torch.no_grad():
        compiled = torch.compile(selective_scan_chunked, backend="aot_eager", fullgraph=True)
        found, expected = (call(op, x, segments=segments) for op in (compiled, selective_scan_reference))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        summary = torch.compile(selective_scan_summary, backend="aot_eager", fullgraph=True)(*x[:4], segments=segments)
        for a, b in zip(summary, selective_scan_summary(*x[:4], segments=segments), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("t", [0, 7, 16, 20])
def test_the_operators_are_well_formed(t: int, skip: bool, packed: bool) -> None:
    x = Inputs(*(z.detach() for z in inputs(0, 2, t, g=2)))
    state = x.initial_state.view(4, 2, 3).transpose(1, 2)
    segments = documents(t) if packed and t else None
    A, D = (by_row(z, 2, 2, z.dtype) for z in (x.A, x.D))
    given = (x.x, x.dt, x.B, x.C, A, D if skip else None)
    check_operators(chunked._OP, arguments(given, segments, (8,)), [state])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("t", [1, 20])
def test_torch_func(t: int, packed: bool) -> None:
    x = Inputs(*(z.detach() for z in inputs(3, 2, t)))
    segments = random_segments(3, 2, t) if packed else None

    def alone(op, B: Tensor) -> Tensor:
        return op(x.x, x.dt, x.A, B, B, segments=segments, chunk_size=8)[1].square().sum()

    check_torch_func(selective_scan_chunked, selective_scan_reference, x, segments, alone, x.B)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("t", [1, 20])
def test_checkpointing_agrees(t: int, packed: bool) -> None:
    x, segments = inputs(3, 2, t), random_segments(3, 2, t) if packed else None
    check_checkpointing(selective_scan_chunked, x, segments)


def test_second_derivatives_are_refused_not_wrong() -> None:
    x = inputs(0, 1, 9)
    check_second_derivatives_are_refused(selective_scan_chunked, selective_scan_reference, x, x.x)


class Arithmetic(TorchDispatchMode):
    """Numbers that elementwise arithmetic and sums take in."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in ("mul", "add", "exp"):
            self.total += out.numel()
        elif name == "sum":
            self.total += args[0].numel()
        return out


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(("t", "g"), [(20, None), (7, 2)])
def test_operations_are_counted_as_those_of_the_recurrence(t: int, g: int | None, skip: bool) -> None:
    x = inputs(0, 2, t, g=g)
    given = x[:6] if skip else x[:5]
    with Arithmetic() as plain, torch.no_grad():
        selective_scan_reference(*given)
    with CountWork() as first:
        y, state = selective_scan_chunked(*given, chunk_size=8)
    with CountWork() as second:
        torch.autograd.grad(y.sum() + state.sum(), given)
    assert first.parts["forward"].useful == plain.total < first.parts["forward"].flops
    assert 2 * plain.total < second.parts["forward"].useful < 3 * plain.total
