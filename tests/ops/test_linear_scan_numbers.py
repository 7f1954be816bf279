"""What ``linear_scan`` does with finite precision, memory and autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtf.core import Segments
from hybridtf.ops.linear_scan import chunked, linear_scan_chunked, linear_scan_reference
from tests.ops.linear_scan_cases import Inputs, call, grads, inputs
from tests.ops.live_bytes import Peak
from tests.ops.operators import arguments, inside
from tests.ops.ssd_cases import random_segments


def judged(x: Inputs, **more) -> list[tuple[Tensor, Tensor]]:
    """All results and gradients in x's own precision, each beside that of the float64 reference on the same numbers."""
    exact = x.map(lambda y: y.detach().double().requires_grad_())
    results = [(z, call(op, z, **more)) for z, op in ((x, linear_scan_chunked), (exact, linear_scan_reference))]
    found, wanted = ([*out, *grads(out, z, 1)] for z, out in results)
    return list(zip(found, wanted, strict=True))


def relative(a: Tensor, exact: Tensor) -> float:
    a, exact = a.detach().double(), exact.detach()
    return float((a - exact).norm() / exact.norm().clamp(min=1e-300))


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_decays_of_every_strength_side_by_side(packed: bool, pair: bool) -> None:
    x = inputs(0, 3, 700, 9, pair=pair, dtype=torch.float32)
    levels = torch.tensor([-torch.inf, -1000.0, -200.0, -80.0, -10.0, -1.0, -1e-3, -1e-7, 0.0])
    mixed = levels[torch.randint(9, (3, 700, 9), generator=torch.Generator().manual_seed(1))]
    for log_a in (levels.expand(3, 700, 9), mixed):
        y = x._replace(decay=(log_a.clone().requires_grad_(), *x.decay[1:]))
        for a, b in judged(y, segments=random_segments(0, 3, 700) if packed else None):
            assert torch.isfinite(a).all()
            torch.testing.assert_close(a.detach().double(), b.detach(), rtol=2e-5, atol=2e-5 * float(b.detach().abs().max()))


def test_a_state_after_strong_decays_is_as_small_as_it_should_be() -> None:
    """No quotient of products: what is left of 1 after 64 steps of exp(-1), in float32, to seven digits."""
    log_a = torch.full((1, 64, 1), -1.0)
    h, _ = linear_scan_chunked(torch.zeros(1, 64, 1), log_a, initial_state=torch.ones(1, 1))
    torch.testing.assert_close(h[0, :, 0].double(), torch.arange(-1, -65, -1.0, dtype=torch.float64).exp(), rtol=1e-5, atol=0)
    assert not linear_scan_chunked(torch.zeros(1, 64, 1), log_a - torch.inf, initial_state=torch.ones(1, 1))[0].any()


@pytest.mark.parametrize("form", ["log", "a", "pair", "timeless"])
def test_weak_decays_over_65536_tokens(form: str) -> None:
    """1 - 1e-7 a token: in float32 a loop multiplies the rounding of each factor 65536 times; the sum of logarithms not."""
    t, weak = 65536, -1e-7
    gen = torch.Generator().manual_seed(0)
    u = torch.randn(1, t, 2, generator=gen)
    one = torch.ones(1, 2)
    factor = torch.tensor([weak, 3 * weak]).expand(1, t, 2)
    factor = factor[0, 0] if form == "timeless" else factor
    if form == "a":
        # One rounding step below 1: as a number, not as a logarithm.
        x = Inputs((u,), (torch.full((1, t, 2), 1 - 2**-23),), (one,), log=False)
    elif form == "pair":
        turn = torch.full((1, t, 2), 0.1)
        x = Inputs((u, u.flip(1)), (factor, turn), (one, one), log=True)
    else:
        x = Inputs((u,), (factor,), (one,), log=True)
    exact = x.map(Tensor.double)
    with torch.no_grad():
        found = call(linear_scan_chunked, x)
        wanted = call(linear_scan_chunked, exact)
        untouched = call(linear_scan_chunked, x._replace(u=tuple(torch.zeros_like(y) for y in x.u)))
    for a, b in zip(found, wanted, strict=True):
        assert relative(a, b) < 4e-6
    if form in ("log", "timeless"):
        left = torch.tensor([t * weak, 3 * t * weak], dtype=torch.float64).exp()
        torch.testing.assert_close(untouched[1][0].double(), left, rtol=4e-6, atol=0)


def test_the_judge_of_long_rows_is_itself_judged() -> None:
    """The float64 form over 4096 weak steps against the loop."""
    x = inputs(0, 1, 4096, 2, rate=1e-7)
    with torch.no_grad():
        for a, b in zip(*(call(op, x) for op in (linear_scan_chunked, linear_scan_reference)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("timeless", [False, True])
def test_gradient_of_weak_decays_in_float32(timeless: bool) -> None:
    x = inputs(1, 2, 2000, 3, timeless=timeless, dtype=torch.float32, rate=1e-6)
    for a, b in judged(x):
        assert relative(a, b) < 3e-6


def test_gradient_of_a_strong_step_among_weak_ones() -> None:
    x = inputs(3, 2, 64, 4, dtype=torch.float32)
    log_a = torch.full((2, 64, 4), -0.01)
    log_a[:, 30] = -12.0
    x = x._replace(decay=(log_a.requires_grad_(),))
    a, b = judged(x)[3]
    assert relative(a[:, 30], b[:, 30]) < 1e-5


def test_packed_and_separate_differ_by_rounding_alone() -> None:
    lengths = [12, 1, 50, 23]
    x = inputs(0, 1, sum(lengths), 8, dtype=torch.float32, rate=0.3)
    h, _ = call(linear_scan_chunked, x, given=False, segments=Segments.from_lengths([lengths]))
    pieces = zip(x.u[0].split(lengths, 1), x.decay[0].split(lengths, 1), strict=True)
    own = torch.cat([linear_scan_chunked(*piece)[0] for piece in pieces], 1)
    torch.testing.assert_close(h, own, rtol=1e-6, atol=1e-6)


def test_autocast_changes_nothing() -> None:
    x = inputs(2, 2, 40, dtype=torch.float32)
    expected = call(linear_scan_chunked, x)
    expected = (*expected, *grads(expected, x))
    with torch.autocast("cpu", torch.bfloat16):
        found = call(linear_scan_chunked, x)
        found = (*found, *grads(found, x))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def in_order(x: Inputs) -> tuple[Any, ...]:
    """As the operators take them."""
    return arguments((*(*x.u, None)[:2], *(*x.decay, None)[:2]), None, (True,))


def peak(t: int, pair: bool) -> Peak:
    """Of both passes, which a dispatch mode sees as one call each from outside."""
    x = inputs(0, 1, t, 16, pair=pair, dtype=torch.float32).map(Tensor.detach)
    with Peak() as mode:
        inside(chunked._OP, in_order(x), x.state, by_result=True)
    return mode


@pytest.mark.parametrize("pair", [False, True])
def test_memory_and_calls_are_linear_in_the_length(pair: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridtf.ops.spans.SPAN_BUDGET", 1)
    monkeypatch.setattr("hybridtf.ops.linear_scan.spans.SPAN_TOKENS", 128)
    first, second, third = (peak(t, pair) for t in (512, 1024, 2048))
    assert third.calls - second.calls < 2.1 * (second.calls - first.calls)
    # What a token adds, seen or made: u, its factor, its state, the gradient that came in, and two that go out.
    token = 4 * 16 * (2 if pair else 1)
    assert (third.most - second.most) / 1024 <= 6 * token


def test_saved_are_the_states_and_the_factor_alone() -> None:
    saved: list[int] = []
    x = inputs(0, 1, 2048, 16, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda z: (saved.append(z.numel()), z)[1], lambda z: z):
        call(linear_scan_chunked, x)
    assert sum(saved) <= 2 * 2048 * 16 + 16


def test_the_number_of_calls_does_not_grow_with_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """However wide a token is, chunks are swept side by side: never one step a token."""
    monkeypatch.setattr("hybridtf.ops.spans.SPAN_BUDGET", 1)
    x = inputs(0, 1, 2048, 4, dtype=torch.float32).map(Tensor.detach)
    with Peak() as mode:
        inside(chunked._OP, in_order(x), x.state, backward=False)
    assert mode.calls < 2048
