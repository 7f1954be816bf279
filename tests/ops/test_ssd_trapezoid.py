"""``ssd_trapezoid``: against ``ssd`` with doubled tokens, finite differences, strong decay, compiler, number of calls."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import ConfigError, Segments
from hybridtf.ops.ssd import ssd_reference, trapezoid_chunked, trapezoid_reference
from tests.ops.live_bytes import Peak
from tests.ops.recurrence_cases import assert_alike

FORMS = (trapezoid_reference, trapezoid_chunked)
NAMES = ("S", "k", "v")


def draw(t, dtype=torch.float64, decay=1.0, b=2, g=1, h=2, n=5, p=3):
    gen = torch.Generator().manual_seed(t)
    shapes = ((b, t, g, n), (b, t, g, n), (b, t, h, p), (b, t, h), (b, t, h), (b, t, h), (b, h, n, p), (b, g, n), (b, h, p))
    x = [torch.randn(s, generator=gen, dtype=torch.float64) for s in shapes]
    x[3] = -decay * x[3].abs()
    return [z.to(dtype).requires_grad_() for z in x]


def run(form, x, segments=None):
    y, state = form(*x[:6], initial_state=dict(zip(NAMES, x[6:], strict=True)), segments=segments, chunk_size=4)
    return y, *(state[name] for name in NAMES)


def doubled(x):
    """Each token as two: the first decays and writes the pair of before, the second writes its own and is read."""
    q, k, v, log_a, beta, gamma, S, k_last, v_last = x

    def both(first, second):
        return torch.stack([first, second], 2).flatten(1, 2)

    k_before, v_before = (torch.cat([last[:, None], z[:, :-1]], 1) for z, last in ((k, k_last), (v, v_last)))
    y, last = ssd_reference(
        both(q, q), both(k_before, k), both(beta[..., None] * v_before, gamma[..., None] * v),
        both(log_a, torch.zeros_like(log_a)), initial_state=S,
    )
    return y[:, 1::2], last, k[:, -1], v[:, -1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("t", [1, 2, 13])
def test_it_is_ssd_with_two_writes_a_token(form, t):
    x = draw(t)
    got, want = run(form, x), doubled(x)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    weights = [torch.randn_like(z) for z in got]
    grads = [torch.autograd.grad(sum((z * w).sum() for z, w in zip(zs, weights, strict=True)), x) for zs in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


def test_gradients_are_those_of_finite_differences():
    segments = Segments.from_ids(torch.tensor([[1, 1, 0, 1, 2, 2], [0, 3, 3, 3, 4, 0]]), continues=torch.tensor([True, False]))
    assert torch.autograd.gradcheck(lambda *x: run(trapezoid_chunked, x, segments), draw(6))


@pytest.mark.parametrize("decay", [0.01, 50.0, 1e6])
def test_float32_is_right_at_any_decay(decay):
    results = []
    for dtype in (torch.float32, torch.float64):
        x = draw(200, dtype, decay)
        out = run(trapezoid_chunked, x)
        results.append([*out, *torch.autograd.grad(sum(z.sum() for z in out), x)])
    for a, b in zip(*results, strict=True):
        assert torch.isfinite(a).all()
        assert (a.double() - b).detach().abs().max() <= 2e-5 * b.detach().abs().max().clamp(min=1)


def test_a_compiler_sees_the_same():
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    x = draw(13)
    segments = Segments.from_ids(torch.tensor([[1] * 5 + [2] * 8, [0] + [1] * 12]), continues=True)
    for packed in (None, segments):
        got, want = (f(trapezoid_chunked, x, packed) for f in (compiled, run))
        assert_alike(got, want, x)


def test_the_number_of_calls_does_not_grow_with_the_length():
    counts = []
    for t in (64, 512):
        segments = Segments.from_ids(torch.arange(t).div(20, rounding_mode="floor").add(1).repeat(2, 1))
        with Peak() as calls:
            run(trapezoid_chunked, draw(t), segments)[0].sum().backward()
        counts.append(calls.calls)
    assert counts[0] == counts[1]


def test_bfloat16_and_half_are_close():
    x = [z.detach() for z in draw(40)]
    want = run(trapezoid_chunked, x)[0]
    for dtype, tol in ((torch.bfloat16, 0.15), (torch.float16, 0.03)):
        y = run(trapezoid_chunked, [z.to(dtype) for z in x])[0]
        assert y.dtype == dtype
        assert F.mse_loss(y.double(), want).sqrt() < tol * want.std()


@pytest.mark.parametrize("form", FORMS)
def test_what_does_not_fit_is_refused(form):
    x = draw(3)
    with pytest.raises(ConfigError, match=r"gamma must be \(b t h\) = \(2, 3, 2\); got \(2, 3\)"):
        form(*x[:5], x[5][..., 0])
    with pytest.raises(ConfigError, match=r"initial_state\['k'\] must be \(2, 1, 5\); got None"):
        form(*x[:6], initial_state={"S": x[6]})
