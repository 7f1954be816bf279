"""``ssd_stabilised``: against the published formula without a maximum, extreme gates, precision, compiler, number of calls."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import ConfigError, Segments
from hybridtf.ops.ssd import stabilised_chunked, stabilised_reference
from tests.ops.live_bytes import Peak
from tests.ops.recurrence_cases import assert_alike

FORMS = (stabilised_reference, stabilised_chunked)


def draw(t, scale=1.0, dtype=torch.float64, seed=0, b=2, g=1, h=2, n=5, p=3):
    gen = torch.Generator().manual_seed(seed)
    shapes = ((b, t, g, n), (b, t, g, n), (b, t, h, p), (b, t, h), (b, t, h))
    q, k, v, f, i = (torch.randn(s, generator=gen, dtype=torch.float64) for s in shapes)
    given = (q, k, v, torch.nn.functional.logsigmoid(f * scale), i * scale)
    return [x.to(dtype).requires_grad_() for x in given]


def quadratic(q, k, v, log_f, log_i):
    """Without a maximum and without eps: weights exp(log_i_s + log_f after s) over max(|their sum|, 1)."""
    heads = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(heads, 2) for x in (q, k))
    c = log_f.cumsum(1)
    later = torch.ones(q.shape[1], q.shape[1]).triu(1).bool()[..., None]
    after = (c[:, :, None] - c[:, None] + log_i[:, None]).masked_fill(later, -torch.inf)
    weight = torch.einsum("bthn,bshn->btsh", q, k) * after.exp()
    return torch.einsum("btsh,bshp->bthp", weight, v) / weight.sum(2).abs().clamp(min=1)[..., None]


@pytest.mark.parametrize("form", FORMS)
def test_without_eps_it_is_the_formula_without_a_maximum(form):
    x = draw(19, 2.0)
    got, want = form(*x, eps=0.0, chunk_size=4)[0], quadratic(*x)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    weight = torch.randn(got.shape, dtype=got.dtype)
    for a, b in zip(torch.autograd.grad((got * weight).sum(), x), torch.autograd.grad((want * weight).sum(), x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_finite_differences(form):
    x = [*draw(6, seed=3), torch.randn(2, 2, 5, 4, dtype=torch.float64, requires_grad=True),
         torch.randn(2, 2, dtype=torch.float64, requires_grad=True)]
    segments = Segments.from_ids(torch.tensor([[1, 1, 0, 1, 2, 2], [0, 3, 3, 3, 4, 0]]), continues=torch.tensor([True, False]))

    def run(*z):
        y, state = form(*z[:5], initial_state={"S": z[5], "m": z[6]}, segments=segments, eps=0.4, chunk_size=4)
        return y, state["S"], state["m"]

    assert torch.autograd.gradcheck(run, x)


@pytest.mark.parametrize("scale", [15.0, 300.0, 1000.0])
@pytest.mark.parametrize("packed", [False, True])
def test_gates_of_any_size_stay_finite_and_right(packed, scale):
    """Up to 1000 either way, which no exponential survives; float32 against float64, values and gradients."""
    t = 150
    ids = torch.arange(t).div(40, rounding_mode="floor").add(1).repeat(2, 1)
    segments = Segments.from_ids(ids, continues=False) if packed else None
    results = []
    for dtype in (torch.float32, torch.float64):
        # Keys like queries: a denominator is a sum of numbers of one sign, as near 0 no float32 is right.
        q, k, v, f, i = draw(t, scale, dtype)
        q, k = q.detach().abs().requires_grad_(), k.detach().abs().requires_grad_()
        y, state = stabilised_chunked(q, k, v, f, i, segments=segments)
        grads = torch.autograd.grad(y.sum() + state["S"].sum(), [q, k, v, f, i])
        results.append([y, *state.values(), *grads])
    for a, b in zip(*results, strict=True):
        assert torch.isfinite(a).all()
        error = (a.double() - b).detach().abs().max() / b.detach().abs().max().clamp(min=1)
        assert error < 2e-4, float(error)


def test_extremes_one_by_one():
    q = k = torch.ones(1, 3, 1, 1, dtype=torch.float64)
    v = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64).view(1, 3, 1, 1)
    zero = torch.zeros(1, 3, 1, dtype=torch.float64)

    def run(i, f):
        gates = (torch.tensor(z, dtype=torch.float64).view(1, 3, 1).requires_grad_() for z in (f, i))
        f, i = gates
        y, state = stabilised_chunked(q, k, v, f, i, eps=0.0)
        assert all(torch.isfinite(z).all() for z in torch.autograd.grad(y.sum() + state["S"].sum(), (f, i)))
        return y.flatten().tolist()

    assert run([0.0] * 3, zero.flatten().tolist()) == pytest.approx([1, 1.5, 7 / 3])
    assert run([1000.0, -1000.0, -1000.0], [0.0] * 3) == pytest.approx([1, 1, 1])
    assert run([-1000.0] * 3, [-1000.0] * 3) == pytest.approx([0, 0, 0])
    assert run([0.0, 0.0, 0.0], [-1e6] * 3) == pytest.approx([1, 2, 4])
    assert run([0.0, -torch.inf, 0.0], [0.0] * 3) == pytest.approx([1, 1, 2.5])


def test_a_compiler_sees_the_same():
    compiled = torch.compile(stabilised_chunked, backend="aot_eager", fullgraph=True)
    x = draw(13)
    segments = Segments.from_ids(torch.tensor([[1] * 5 + [2] * 8, [0] + [1] * 12]), continues=False)
    for packed in (None, segments):
        got, want = (f(*x, segments=packed, chunk_size=4) for f in (compiled, stabilised_chunked))
        assert_alike(got, want, x)


def test_the_number_of_calls_does_not_grow_with_the_length():
    counts = []
    for t in (64, 512):
        x = draw(t)
        segments = Segments.from_ids(torch.arange(t).div(20, rounding_mode="floor").add(1).repeat(2, 1))
        with Peak() as calls:
            y, _ = stabilised_chunked(*x, segments=segments)
            y.sum().backward()
        counts.append(calls.calls)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("form", FORMS)
def test_what_does_not_fit_is_refused(form):
    x = draw(3)
    with pytest.raises(ConfigError, match=r"log_i must be \(b t h\) = \(2, 3, 2\); got \(2, 3\)"):
        form(*x[:4], x[4][..., 0])
    with pytest.raises(ConfigError, match=r"initial_state\['m'\] must be \(2, 2\); got None"):
        form(*x, initial_state={"S": torch.zeros(2, 2, 5, 4)})
