"""What ``selective_scan`` does with finite precision, memory and autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtf.core.segments import Segments
from hybridtf.ops.selective_scan import chunked, selective_scan_chunked, selective_scan_reference, selective_scan_summary
from tests.ops.live_bytes import Peak
from tests.ops.operators import arguments, inside
from tests.ops.recurrence_cases import call, grads, loss
from tests.ops.selective_scan_cases import Inputs, inputs
from tests.ops.ssd_cases import random_segments


def judged(x: Inputs, **more) -> tuple[list[Tensor], list[Tensor]]:
    """All results and gradients in x's own precision, and those of the float64 reference on the same numbers."""
    exact = Inputs(*(z.detach().double().requires_grad_() for z in x))
    first, second = call(selective_scan_chunked, x, **more), call(selective_scan_reference, exact, **more)
    found, expected = (torch.autograd.grad(loss(*out), of) for out, of in ((first, x), (second, exact)))
    return [*first, *found], [*second, *expected]


def relative(a: Tensor, exact: Tensor) -> float:
    a, exact = a.detach(), exact.detach()
    return float((a.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def with_rates(x: Inputs, rates: Tensor) -> Inputs:
    return x._replace(A=rates.to(x.A.dtype).expand_as(x.A).clone().requires_grad_())


@pytest.mark.parametrize("packed", [False, True])
def test_strong_and_weak_decays_side_by_side(packed: bool) -> None:
    """dt A from -1000 to -1e-6 in one channel: nothing overflows, nothing is lost."""
    x = with_rates(inputs(0, 3, 100, n=6, dtype=torch.float32), -torch.tensor([1000.0, 88.0, 10.0, 1.0, 1e-3, 1e-6]))
    x = x._replace(dt=(0.5 + x.dt.detach()).clamp(max=1.0).requires_grad_())
    found, exact = judged(x, segments=random_segments(0, 3, 100) if packed else None, chunk_size=32)
    for a, b in zip(found, exact, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)
    assert torch.equal(found[1][..., 0] == 0, exact[1].float()[..., 0] == 0)


def test_strong_steps_among_weak_ones_lose_nothing() -> None:
    x = with_rates(inputs(1, 2, 64, n=3, dtype=torch.float32), -torch.ones(3))
    dt = torch.full_like(x.dt, 1e-3)
    dt[:, 5:20] = 1000.0
    dt[:, 40] = 30.0
    found, exact = judged(x._replace(dt=dt.requires_grad_()))
    for a, b in zip(found, exact, strict=True):
        assert relative(a, b) < 1e-6


def test_gradient_of_a_strong_step_among_weak_ones() -> None:
    x = with_rates(inputs(3, 2, 64, n=3, dtype=torch.float32), -torch.tensor([0.5, 1.0, 2.0]))
    dt = torch.full_like(x.dt, 0.01)
    dt[:, 30] = 6.0
    found, exact = judged(x._replace(dt=dt.requires_grad_()))
    assert relative(found[3][:, 30], exact[3][:, 30]) < 1e-6
    assert relative(found[4], exact[4]) < 1e-6


def test_an_impulse_fades_at_its_rate() -> None:
    rates = torch.arange(1.0, 17.0)
    x, dt = torch.zeros(1, 65, 1), torch.full((1, 65, 1), 0.05)
    x[:, 0] = 1
    ones = torch.ones(1, 65, 16)
    _, state = selective_scan_chunked(x, dt, -rates[None], ones, ones)
    expected = dt[0, 0, 0].double() * (-64 * dt[0, 0, 0].double() * rates.double()).exp()
    torch.testing.assert_close(state[0, 0].double(), expected, rtol=1e-5, atol=0)


def test_packed_and_separate_differ_by_rounding_alone() -> None:
    lengths = [12, 16, 50, 23, 30]
    segments = Segments.from_lengths([lengths])
    for dtype, tol in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        x = inputs(0, 1, sum(lengths), n=8, dtype=dtype, step=0.3)
        y, _ = selective_scan_chunked(*x[:6], segments=segments, chunk_size=16)
        own, start = [], 0
        for n in lengths:
            own.append(selective_scan_chunked(*x.part(slice(None), slice(start, start + n)), chunk_size=16)[0])
            start += n
        assert relative(y, torch.cat(own, 1).double()) < tol


@pytest.mark.parametrize("packed", [False, True])
def test_bfloat16_is_close_to_float64_and_keeps_the_state(packed: bool) -> None:
    x = inputs(2, 2, 150, n=16, dtype=torch.bfloat16, step=0.2)
    wide = {name: getattr(x, name).detach().float().requires_grad_() for name in ("dt", "A", "D", "initial_state")}
    segments = random_segments(2, 2, 150) if packed else None
    found, exact = judged(x._replace(**wide), segments=segments)
    for a, b in zip(found, exact, strict=True):
        assert relative(a, b) < 1e-2
    assert found[1].dtype == torch.float32
    assert relative(found[1], exact[1]) < 1e-6


def test_autocast_changes_nothing() -> None:
    x = inputs(2, 2, 40, dtype=torch.float32)
    expected = call(selective_scan_chunked, x, chunk_size=16)
    expected = (*expected, *grads(*expected, x))
    with torch.autocast("cpu", torch.bfloat16):
        found = call(selective_scan_chunked, x, chunk_size=16)
        found = (*found, *grads(*found, x))
        step = selective_scan_chunked(*x.part(slice(None), slice(1)))
        summary = selective_scan_summary(*x[:4])
    plain = selective_scan_chunked(*x.part(slice(None), slice(1)))
    for a, b in zip([*found, *step, *summary], [*expected, *plain, *selective_scan_summary(*x[:4])], strict=True):
        assert torch.equal(a, b)


def in_order(x: Inputs, chunk_size: int) -> tuple[Any, ...]:
    """As the operators take them."""
    return arguments((x.x, x.dt, x.B, x.C, x.A.T[None], x.D[None]), None, (chunk_size,))


def peak(t: int, n: int = 32) -> Peak:
    """Of both passes, which a dispatch mode sees as one call each from outside."""
    x = Inputs(*(z.detach() for z in inputs(0, 1, t, c=8, n=n, g=1, dtype=torch.float32)))
    with Peak() as mode:
        inside(chunked._OP, in_order(x, 32), [x.initial_state.transpose(1, 2)])
    return mode


def test_memory_does_not_hold_the_states() -> None:
    first, second, third = peak(512), peak(1024), peak(2048)
    assert third.most - second.most < 2.2 * (second.most - first.most)
    # Bytes that a token adds: x, dt, B, C, which are inputs, and their gradients, y and its gradient, and a state in 32
    # tokens. The states of all tokens would be 8 * 32 numbers each.
    assert (third.most - second.most) / 1024 < 1.01 * 4 * (2 * (8 + 8 + 32 + 32) + 2 * 8 + 8 * 32 / 32)
    assert third.calls - second.calls < 2.2 * (second.calls - first.calls)


def test_calls_do_not_grow_with_the_tokens_of_a_chunk() -> None:
    given = Inputs(*(z.detach() for z in inputs(0, 1, 1024, g=1)))
    calls = []
    for size in (64, 512):
        with Peak() as mode:
            inside(chunked._OP, in_order(given, size), [torch.zeros(1, 3, 4, dtype=torch.float64)], backward=False)
        calls.append(mode.calls)
    assert calls[1] < calls[0] / 4


def test_saved_tensors_hold_one_state_a_chunk() -> None:
    saved: list[int] = []
    x = inputs(0, 1, 2048, c=8, n=16, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda z: (saved.append(z.numel()), z)[1], lambda z: z):
        call(selective_scan_chunked, x, chunk_size=64)
    assert sum(saved) == sum(z.numel() for z in x[:6]) + 32 * 8 * 16


def test_without_gradients_no_state_is_kept() -> None:
    x = Inputs(*(z.detach() for z in inputs(0, 1, 256, g=1, dtype=torch.float32)))
    found = inside(chunked._OP, in_order(x, 1), [x.initial_state.transpose(1, 2)], backward=False)
    assert found[2][0].numel() == 0
