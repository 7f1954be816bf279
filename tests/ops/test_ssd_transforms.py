"""``ssd_chunked`` under what rewrites functions: the compiler, ``torch.func``, checkpointing, counters, double backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from hybridtf.core.segments import Segments
from hybridtf.ops.short_conv import short_conv_reference, short_conv_taps
from hybridtf.ops.spans import count_spans, spans_of
from hybridtf.ops.ssd import chunked, ssd_chunked, ssd_reference
from tests.ops.operators import arguments, check_operators, inside
from tests.ops.recurrence_cases import (
    call,
    check_checkpointing,
    check_second_derivatives_are_refused,
    check_torch_func,
)
from tests.ops.ssd_cases import Inputs, inputs, random_segments

LENGTHS = [5, 7, 16, 17, 31, 32, 33, 64, 100, 128, 200, 260, 2, 3]


def documents(t: int, b: int = 2) -> Segments:
    """Two documents a row and a left pad."""
    ids = torch.arange(t).ge(t // 2).to(torch.int64).add(1).repeat(b, 1)
    ids[0, :1] = 0
    return Segments.from_ids(ids, continues=True)


def mixer(fast: bool, x: Tensor, weight: Tensor, log_a: Tensor, states, segments: Segments | None):
    """A convolution before a recurrence that is given one tensor for q and k, and for v where the sizes allow."""
    conv, op = (short_conv_taps, ssd_chunked) if fast else (short_conv_reference, ssd_reference)
    x, tokens = conv(x, weight, initial_state=states and states[0], segments=segments, activation="silu")
    q = x.unflatten(-1, (4, 4))
    y, state = op(q, q, q, log_a, initial_state=states and states[1], segments=segments, chunk_size=16)
    return y, tokens, state


def compile_and_compare(backend: str, dynamic: bool, packed: bool, given: bool, lengths: list[int]) -> int:
    """Values and gradients at every length against the references; how often the compiler had to start."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda *a: mixer(True, *a), backend=counter, fullgraph=True, dynamic=dynamic)
    for t in lengths:
        gen = torch.Generator().manual_seed(t)
        x, weight, log_a, tokens, state = (
            torch.randn(s, generator=gen, dtype=torch.float64)
            for s in ((2, t, 16), (16, 4), (2, t, 4), (2, 3, 16), (2, 4, 4, 4))
        )
        leaves = [z.requires_grad_() for z in (x, weight, -log_a.abs(), tokens, state)][: 5 if given else 3]
        args = (*leaves[:3], tuple(leaves[3:]) or None, documents(t) if packed else None)
        found, expected = compiled(*args), mixer(False, *args)
        pairs = [(z, torch.autograd.grad(sum(y.square().sum() for y in z), leaves)) for z in (found, expected)]
        for a, b in zip([*pairs[0][0], *pairs[0][1]], [*pairs[1][0], *pairs[1][1]], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    return counter.frame_count


@pytest.mark.parametrize(
    ("backend", "packed", "given"),
    [*[("eager", packed, given) for packed in (False, True) for given in (False, True)], ("aot_eager", True, True)],
)
def test_one_graph_for_many_lengths(backend: str, packed: bool, given: bool) -> None:
    assert compile_and_compare(backend, True, packed, given, LENGTHS) <= 2


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_of_fixed_shapes(backend: str, packed: bool, given: bool) -> None:
    assert compile_and_compare(backend, False, packed, given, [37]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor(dynamic: bool, packed: bool, given: bool) -> None:
    assert compile_and_compare("inductor", dynamic, packed, given, LENGTHS if dynamic else [37]) <= 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_gradients(dynamic: bool) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *a: mixer(True, *a), backend=counter, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        for t in [1, 40, 41, 90] if dynamic else [40]:
            args = (torch.randn(2, t, 16), torch.randn(16, 4), -torch.rand(2, t, 4), None, documents(t))
            for a, b in zip(compiled(*args), mixer(True, *args), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("t", [0, 7, 16, 20])
def test_the_operators_are_well_formed(t: int, packed: bool) -> None:
    x = Inputs(*(z.detach() for z in inputs(0, 2, t, h=4, n=4)))
    state = x.initial_state.view(2, 1, 4, 4, 3).transpose(2, 3)
    check_operators(chunked._OP, arguments(x[:4], documents(t) if packed and t else None, (8,)), [state])


@pytest.mark.parametrize("at_once", [1, 2, 3, 7])
def test_spans_are_counted_as_they_are_cut(at_once: int) -> None:
    for t in range(40):
        spans = spans_of(t, 8, at_once)
        assert count_spans(t, 8, at_once) == len(spans)
        assert [i for s in spans for i in range(s.start, s.stop)] == list(range(t))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("t", [1, 20])
def test_torch_func(t: int, packed: bool) -> None:
    x = Inputs(*(z.detach() for z in inputs(3, 2, t)))
    segments = random_segments(3, 2, t) if packed else None

    def alone(op, k: Tensor) -> Tensor:
        return op(k, k, *x[2:4], segments=segments, chunk_size=8)[1].square().sum()

    check_torch_func(ssd_chunked, ssd_reference, x, segments, alone, x.k)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("t", [1, 20])
def test_checkpointing_reads_what_was_saved_once(t: int, packed: bool) -> None:
    x, segments = inputs(3, 2, t), random_segments(3, 2, t) if packed else None
    check_checkpointing(ssd_chunked, x, segments)
    unpacked: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda z: z, lambda z: (unpacked.append(id(z)), z)[1]):
        y, (state,) = chunked._OP(x[:4], (), (8,), segments, [x.initial_state.view(2, 1, 5, 2, 3)])
    torch.autograd.grad(y.sum() + state.sum(), x)
    assert len(unpacked) == (8 if packed else 5)


def test_second_derivatives_are_refused_not_wrong() -> None:
    x = inputs(0, 1, 9)
    check_second_derivatives_are_refused(ssd_chunked, ssd_reference, x, x.v)


@pytest.mark.parametrize(("t", "chunk_size"), [(20, 8), (16, 8), (7, 8), (0, 8), (130, 64)])
def test_operations_are_counted_as_those_inside(t: int, chunk_size: int) -> None:
    x = inputs(0, 2, t, g=2, h=6, n=4)
    totals = []
    given = arguments([z.detach() for z in x[:4]], None, (chunk_size,))
    state = [x.initial_state.detach().view(2, 2, 3, 4, 3).transpose(2, 3)]
    for whole in (True, False):
        with FlopCounterMode(display=False) as first:
            if whole:
                y, last = call(ssd_chunked, x, chunk_size=chunk_size)
            else:
                inside(chunked._OP, given, state, backward=False)
        with FlopCounterMode(display=False) as second:
            if whole:
                torch.autograd.grad(y.sum() + last.sum(), x)
            else:
                inside(chunked._OP, given, state)
        totals.append((first.get_total_flops(), second.get_total_flops()))
    (one, two), (forward, both) = totals
    assert (one, two) == (forward, both - forward)
    assert t == 0 or 0 < totals[0][0] < totals[0][1]
