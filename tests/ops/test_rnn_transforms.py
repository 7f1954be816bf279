"""``rnn_fused`` in low precision, under the compiler, checkpointing and counters, and over long rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hybridtf.core.segments import Segments
from hybridtf.ops.rnn import GATES, fused, rnn_fused, rnn_reference
from tests.ops.rnn_cases import CELLS, OPS, assert_same, grads, inputs, leaves
from tests.ops.ssd_cases import random_segments


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("packed", [False, True])
def test_the_state_is_wide_and_only_results_are_rounded(op: Any, cell: str, dtype: torch.dtype, packed: bool) -> None:
    given, segments = inputs(1, cell, 3, 40, 6, 5, dtype=dtype), random_segments(1, 3, 40) if packed else None
    wide = {k: v.detach().double() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    wide["initial_state"] = {k: v.detach().double() for k, v in given["initial_state"].items()}
    with torch.no_grad():
        y, state = op(**given, segments=segments)
        y_wide, state_wide = rnn_reference(**wide, segments=segments)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), y_wide, rtol=torch.finfo(dtype).eps, atol=2e-5)
    for name, value in state.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), state_wide[name], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("cell", CELLS)
def test_autocast_changes_nothing(cell: str) -> None:
    given = inputs(2, cell, 2, 9, dtype=torch.float32)
    plain = rnn_fused(**given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = rnn_fused(**given)
    assert_same(given, cast, plain, tol=0.0)


def documents(t: int) -> Segments:
    """Two documents a row and a left pad."""
    ids = torch.arange(t).ge(t // 2).to(torch.int64).add(1).repeat(2, 1)
    ids[0, :1] = 0
    return Segments.from_ids(ids, continues=torch.tensor([True, False]))


def compile_and_compare(backend: str, cell: str, dynamic: bool, packed: bool, lengths: list[int], **options: Any) -> int:
    """Values and gradients at every length against the reference; how often the compiler had to start."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(rnn_fused, backend=counter, fullgraph=True, dynamic=dynamic)
    for t in lengths:
        given, segments = inputs(t, cell, 2, t, **options), documents(t) if packed else None
        assert_same(given, compiled(**given, segments=segments), rnn_reference(**given, segments=segments))
    return counter.frame_count


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_for_many_lengths(backend: str, cell: str, packed: bool) -> None:
    assert compile_and_compare(backend, cell, True, packed, [5, 7, 64, 2, 3]) <= 2


@pytest.mark.parametrize("options", [{"bias": False}, {"project": False}, {"project": False, "bias": False}])
def test_compiles_with_fewer_arguments(options: dict[str, bool]) -> None:
    for cell in ("lstm", "gru"):
        assert compile_and_compare("aot_eager", cell, False, True, [9], **options) == 1


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor(dynamic: bool, packed: bool) -> None:
    assert compile_and_compare("inductor", "lstm", dynamic, packed, [5, 7, 64] if dynamic else [37]) <= 2


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_without_gradients(packed: bool) -> None:
    compiled = torch.compile(rnn_fused, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for t in (1, 9, 10):
            given, segments = inputs(t, "lstm", 2, t), documents(t) if packed else None
            y, state = compiled(**given, segments=segments)
            y_plain, plain = rnn_reference(**given, segments=segments)
            torch.testing.assert_close([y, *state.values()], [y_plain, *plain.values()], rtol=0, atol=1e-12)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("t", [0, 7])
def test_the_operators_are_well_formed(cell: str, packed: bool, t: int) -> None:
    given = inputs(0, cell, 2, t)
    weights = [given[name] for name in ("weight_hh", "weight_ih", "bias_ih", "bias_hh")]
    state = [given["initial_state"].get(name) for name in ("h", "c")]
    segments = documents(t) if packed and t else None
    masks = (None, None) if segments is None else (segments.ids, segments.continues)
    arguments = (given["x"], *weights, *state, *masks, cell)
    torch.library.opcheck(fused._forward_op, arguments)
    out = fused._forward_op(*arguments)
    detached = [z.detach() if isinstance(z, torch.Tensor) else z for z in arguments]
    torch.library.opcheck(fused._backward_op, (*detached, *(torch.randn_like(z) for z in out)))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("packed", [False, True])
def test_checkpointing(cell: str, packed: bool) -> None:
    given, segments = inputs(3, cell, 2, 12), random_segments(3, 2, 12) if packed else None
    saved = checkpoint(rnn_fused, use_reentrant=False, segments=segments, **given)
    assert_same(given, saved, rnn_fused(**given, segments=segments), tol=0.0)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_func_and_second_derivatives(cell: str, packed: bool, dtype: torch.dtype) -> None:
    given, segments = inputs(7, cell, 2, 6, dtype=dtype), random_segments(7, 2, 6) if packed else None
    x, found = given.pop("x").detach(), []
    for op in (rnn_fused, rnn_reference):

        def loss(x: torch.Tensor, op: Any = op) -> torch.Tensor:
            return op(x, segments=segments, **given)[0].square().sum()

        watched = x.clone().requires_grad_()
        first = torch.autograd.grad(loss(watched), watched, create_graph=True)[0]
        found.append([torch.func.grad(loss)(x).detach(), *torch.autograd.grad(first.square().sum(), watched)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("packed", [False, True])
def test_operations_are_counted_wherever_they_run(cell: str, packed: bool) -> None:
    """float32 takes other loops than float64 (oneDNN's for the LSTM), and the compiled form is one operator."""
    b, t, d, h, rows = 2, 8, 6, 4, len(GATES[cell]) * 4
    want = 2 * b * t * rows * (d + h)
    segments = Segments.from_lengths([[5, 3], [8]]) if packed else None
    for dtype in (torch.float32, torch.float64):
        given = inputs(0, cell, b, t, d, h, dtype=dtype)
        with FlopCounterMode(display=False) as counter:
            y, state = rnn_fused(**given, segments=segments)
        assert counter.get_total_flops() == want
        with FlopCounterMode(display=False) as counter:
            grads(y, state, given)
        assert counter.get_total_flops() == 2 * want
    arguments = [given.get(name) for name in ("x", "weight_hh", "weight_ih", "bias_ih", "bias_hh")]
    arguments += [given["initial_state"].get(name) for name in ("h", "c")]
    with FlopCounterMode(display=False) as counter:
        out = fused._forward_op(*arguments, None, None, cell)
    assert counter.get_total_flops() == want
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(out[0].sum(), leaves(given), allow_unused=True)
    assert counter.get_total_flops() == 3 * want


@pytest.mark.parametrize("cell", ["tanh", "gru"])
def test_a_long_row_of_documents_costs_no_more_memory_a_token(cell: str) -> None:
    """torch's packed loops fill a tensor of the whole length at every step backward: 64 times the bytes for 8 times t."""
    written = []
    for t in (32, 256):
        given = inputs(1, cell, 1, t, dtype=torch.float32)
        with torch.profiler.profile(profile_memory=True) as profile:
            y, state = rnn_fused(**given, segments=Segments.from_lengths([[t // 2, t // 4, t // 4]]))
            grads(y, state, given)
        written.append(sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages()))
    assert written[1] < 12 * written[0]
