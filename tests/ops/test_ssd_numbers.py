"""What ``ssd`` does with finite precision, memory, autocast and the compiler."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.ssd import chunked, ssd_chunked, ssd_reference, ssd_summary
from tests.ops.live_bytes import Peak
from tests.ops.operators import arguments, inside
from tests.ops.recurrence_cases import assert_same, call, grads
from tests.ops.ssd_cases import Inputs, inputs, random_segments


def with_decay(x: Inputs, log_a: Tensor) -> Inputs:
    return x._replace(log_a=log_a.to(x.log_a.dtype).expand_as(x.log_a).clone().requires_grad_())


def judged(x: Inputs, **more) -> tuple[list[Tensor], list[Tensor]]:
    """All results and gradients in x's own precision, and those of the float64 reference on the same numbers."""
    exact = Inputs(*(z.detach().double().requires_grad_() for z in x))
    first, second = call(ssd_chunked, x, **more), call(ssd_reference, exact, **more)
    gen = torch.Generator().manual_seed(1)
    weights = [torch.randn(z.shape, generator=gen, dtype=torch.float64) for z in first]
    sums = [sum((z.double() * w).sum() for z, w in zip(out, weights, strict=True)) for out in (first, second)]
    found = [*first, *torch.autograd.grad(sums[0], x)]
    return found, [*second, *torch.autograd.grad(sums[1], exact)]


def relative(a: Tensor, exact: Tensor) -> float:
    a, exact = a.detach(), exact.detach()
    return float((a.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


@pytest.mark.parametrize("strong", [-20.0, -100.0])
@pytest.mark.parametrize("packed", [False, True])
def test_strong_and_weak_heads_together(strong: float, packed: bool) -> None:
    x = with_decay(inputs(0, 3, 64, dtype=torch.float32), torch.tensor([strong, -1e-3]))
    found, exact = judged(x, segments=random_segments(0, 3, 64) if packed else None)
    for a, b in zip(found, exact, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_a_weak_step_after_strong_ones_loses_nothing() -> None:
    log_a = torch.full((64, 1), -1e-3)
    log_a[:32] = -100.0
    log_a[40] = -30.0
    x = with_decay(inputs(0, 2, 64, n=8, p=8, dtype=torch.float32), log_a)
    found, exact = judged(x)
    assert exact[6].abs().max() < 1e-40  # what is left of the incoming state after 32 such steps
    for a, b in zip(found[:6], exact[:6], strict=True):
        assert relative(a, b) < 1e-6


@pytest.mark.parametrize("gate", [-2.0, -4.0, -6.0, -8.0])
def test_gradient_of_strong_gates_does_not_cancel(gate: float) -> None:
    x = with_decay(inputs(3, 2, 70, n=8, p=8, dtype=torch.float32), torch.tensor(gate))
    found, exact = judged(x)
    assert relative(found[5], exact[5]) < 1e-5
    torch.testing.assert_close(found[5].double(), exact[5], rtol=0, atol=1e-5)


def test_gradient_of_a_strong_step_among_weak_ones() -> None:
    log_a = torch.full((64, 1), -0.01)
    log_a[30] = -12.0
    x = with_decay(inputs(3, 2, 64, n=8, p=8, dtype=torch.float32), log_a)
    found, exact = judged(x)
    assert relative(found[5][:, 30], exact[5][:, 30]) < 1e-6


def test_packed_and_separate_differ_by_rounding_alone() -> None:
    lengths = [50, 64, 202, 92, 123]
    lengths = [n // 4 for n in lengths]
    segments = Segments.from_lengths([lengths])
    for dtype, tol in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        x = inputs(0, 1, sum(lengths), n=8, p=8, dtype=dtype, decay=0.3)
        y, _ = ssd_chunked(*x[:4], segments=segments, chunk_size=16)
        parts = zip(*(z.split(lengths, 1) for z in x[:4]), strict=True)
        own = torch.cat([ssd_chunked(*part, chunk_size=16)[0] for part in parts], 1)
        assert relative(y.detach(), own.detach().double()) < tol


@pytest.mark.parametrize("packed", [False, True])
def test_bfloat16_is_close_to_float64_and_keeps_the_state(packed: bool) -> None:
    x = inputs(2, 2, 150, n=16, p=8, dtype=torch.bfloat16, decay=0.2)
    x = x._replace(
        log_a=x.log_a.detach().float().requires_grad_(), initial_state=x.initial_state.detach().float().requires_grad_()
    )
    segments = random_segments(2, 2, 150) if packed else None
    found, exact = judged(x, segments=segments)
    for a, b in zip(found, exact, strict=True):
        assert relative(a, b) < 1e-2
    assert found[1].dtype == torch.float32
    assert relative(found[1], exact[1]) < 1e-5


def test_autocast_leaves_decays_and_states_alone() -> None:
    x = inputs(2, 2, 40, dtype=torch.float32)
    expected = call(ssd_chunked, x, chunk_size=16)
    expected = (*expected, *grads(*expected, x))
    with torch.autocast("cpu", torch.bfloat16):
        found = call(ssd_chunked, x, chunk_size=16)
        found = (*found, *grads(*found, x))
        summary = ssd_summary(*x[1:4])[1]
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(summary, ssd_summary(*x[1:4])[1])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("t", [1, 37])
def test_compiles_whole(packed: bool, t: int) -> None:
    x = inputs(1, 2, t)
    segments = Segments.from_lengths([[t // 2, t - t // 2]] * 2, continues=True) if packed else None
    compiled = torch.compile(ssd_chunked, backend="eager", fullgraph=True)
    assert_same(x, call(compiled, x, segments=segments, chunk_size=16), call(ssd_reference, x, segments=segments))
    assert ssd_summary(*x[1:4])[1].equal(torch.compile(ssd_summary, backend="eager", fullgraph=True)(*x[1:4])[1])


def peak(t: int) -> Peak:
    """Of both passes, which a dispatch mode sees as one call each from outside."""
    q, k, v, log_a, state = (x.detach() for x in inputs(0, 1, t, h=4, n=8, p=8, dtype=torch.float32))
    with Peak() as mode:
        inside(chunked._OP, arguments((q, k, v, log_a), None, (32,)), [state.view(1, 1, 4, 8, 8).transpose(2, 3)])
    return mode


def test_memory_and_calls_are_linear_in_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridtf.ops.spans.SPAN_BUDGET", 2**12)
    first, second, third = peak(512), peak(1024), peak(2048)
    assert third.most - second.most < 2.2 * (second.most - first.most)
    assert third.calls - second.calls < 2.2 * (second.calls - first.calls)
    # Bytes that a token adds: less than its row of factors (4 heads, 32 places, float32) in four tensors.
    assert (third.most - second.most) / 1024 < 4 * (4 * 32 * 4)


def test_saved_tensors_hold_no_pair_matrices() -> None:
    saved: list[int] = []
    x = inputs(0, 1, 2048, h=4, n=8, p=8, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda z: (saved.append(z.numel()), z)[1], lambda z: z):
        call(ssd_chunked, x, chunk_size=64)
    assert sum(saved) < 4 * sum(z.numel() for z in x)


def test_without_gradients_no_state_is_kept() -> None:
    q, k, v, log_a, state = (x.detach() for x in inputs(0, 1, 256, dtype=torch.float32))
    state = state.view(1, 1, 2, 5, 3).transpose(2, 3)
    assert inside(chunked._OP, arguments((q, k, v, log_a), None, (1,)), [state], backward=False)[2][0].numel() == 0
