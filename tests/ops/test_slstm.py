"""``slstm``: finite differences, large gates, precision, the operators, the compiler, number of calls."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import ConfigError, KernelError, Segments
from hybridtf.ops.slstm import STATES, slstm_reference, slstm_scripted
from tests.ops.live_bytes import Peak
from tests.ops.recurrence_cases import assert_alike

FORMS = (slstm_reference, slstm_scripted)
PACKED = Segments.from_ids(
    torch.tensor([[1, 1, 0, 1, 2, 2, 2, 2, 0], [0, 3, 3, 3, 3, 3, 3, 4, 4]]), continues=torch.tensor([True, False])
)


def draw(t, scale=1.0, dtype=torch.float64, b=2, heads=2, p=3):
    gen = torch.Generator().manual_seed(t)
    shapes = ((b, t, heads, 4 * p), (heads, p, 4 * p), *[(b, heads, p)] * 4)
    x = [torch.randn(s, generator=gen, dtype=torch.float64) for s in shapes]
    x[0], x[4] = x[0] * scale, 1 + x[4].abs()
    return [z.to(dtype).requires_grad_() for z in x]


def run(form, x, segments=None):
    y, state = form(*x[:2], initial_state=dict(zip(STATES, x[2:], strict=True)), segments=segments, chunk_size=4)
    return y, *(state[name] for name in STATES)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("segments", [None, PACKED])
def test_gradients_are_those_of_finite_differences(form, segments):
    assert torch.autograd.gradcheck(lambda *x: run(form, x, segments), draw(9, heads=1, p=2))


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("started", [False, True])
def test_gates_of_any_size_stay_finite_and_right(scale, started):
    results = []
    for dtype in (torch.float32, torch.float64):
        x = draw(60, scale, dtype)
        y, state = slstm_scripted(*x[:2], initial_state=dict(zip(STATES, x[2:], strict=True)) if started else None)
        given = x if started else x[:2]
        results.append([y, *state.values(), *torch.autograd.grad(y.sum() + state["c"].sum(), given)])
    for a, b in zip(*results, strict=True):
        assert torch.isfinite(a).all()
        assert (a.double() - b).detach().abs().max() <= 2e-4 * b.detach().abs().max().clamp(min=1)


def test_second_derivatives_are_the_references_own():
    x = draw(6)
    (grad,) = torch.autograd.grad(run(slstm_scripted, x)[0].square().sum(), x[0], create_graph=True)
    with pytest.raises(KernelError, match="slstm: kernel 'chunked' has no second derivatives"):
        torch.autograd.grad(grad.sum(), x[0])
    (grad,) = torch.autograd.grad(run(slstm_reference, x)[0].square().sum(), x[0], create_graph=True)
    assert torch.isfinite(torch.autograd.grad(grad.sum(), x[0])[0]).all()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiler_sees_one_call(dynamic):
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for t, segments in ((9, None), (9, PACKED), (12, None)):
        x = draw(t)
        got, want = (f(slstm_scripted, x, segments) for f in (compiled, run))
        assert_alike(got, want, x)


def test_the_loop_is_one_call():
    counts = []
    for t in (8, 64):
        with Peak() as calls:
            run(slstm_scripted, draw(t))[0].sum().backward()
        counts.append(calls.calls)
    # The number of kept states grows with the chunks; nothing grows with the tokens.
    assert counts[1] - counts[0] <= 8 * (64 - 8) // 4


@pytest.mark.parametrize("form", FORMS)
def test_what_does_not_fit_is_refused(form):
    x = draw(3)
    with pytest.raises(ConfigError, match=r"x must be \(b t heads 4p\) and weight_hh \(heads p 4p\)"):
        form(x[0], x[1][:1])
    with pytest.raises(ConfigError, match=r"initial_state\['n'\] must be \(b heads p\) = \(2, 2, 3\); got None"):
        form(*x[:2], initial_state={"h": x[2], "c": x[3]})
