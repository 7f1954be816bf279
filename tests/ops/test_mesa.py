"""``mesa`` against fla's plain loops and torch's own least squares, at extreme numbers, and as an operator; the kit holds it to
its reference."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core.errors import ConfigError, KernelError
from hybridtf.interop.strict import StrictFloat64
from hybridtf.ops.mesa import mesa_chunked, mesa_reference
from hybridtf.ops.mesa.solve import conjugate_gradients
from tests.ops.live_bytes import Peak
from tests.ops.operators import arguments, check_operators
from tests.ops.ssd_cases import random_segments
from tests.peers import peer

FORMS = (mesa_reference, mesa_chunked)
H = 2


def draw(t: int, *, b: int = 2, n: int = 4, p: int = 4, decay: float = 0.3, unit: bool = True):
    gen = torch.Generator().manual_seed(t)
    q, k, v = (torch.randn(b, t, H, width, generator=gen, dtype=torch.float64) for width in (n, n, p))
    beta, log_a = (torch.randn(b, t, H, generator=gen, dtype=torch.float64) for _ in range(2))
    k = k / k.norm(dim=-1, keepdim=True) if unit else k
    half = torch.randn(b, H, n, n, generator=gen, dtype=torch.float64)
    x = {"q": q, "k": k, "v": v, "beta": beta.sigmoid(), "log_a": -log_a.abs() * decay}
    x["ridge"] = 0.25 + torch.rand(H, n, generator=gen, dtype=torch.float64)
    x["initial_state"] = torch.cat([half @ half.mT / n, torch.randn(b, H, n, p, generator=gen, dtype=torch.float64)], -1)
    return {name: z.requires_grad_() for name, z in x.items()}


def gradients(out, given):
    loss = sum((z.double() * torch.linspace(1, 2, z.numel(), dtype=torch.float64).view_as(z)).sum() for z in out)
    return torch.autograd.grad(loss, given, retain_graph=True)


def agree(found, expected, x, *, tol: float = 1e-9) -> None:
    given = list(x.values())
    for a, b in zip([*found, *gradients(found, given)], [*expected, *gradients(expected, given)], strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@pytest.fixture
def in_float64():
    """fla makes its states in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with StrictFloat64():
        yield
    torch.set_default_dtype(before)


def parts(state, n: int = 4):
    return state[..., :n], state[..., n:]


@pytest.mark.parametrize("op", FORMS)
def test_against_the_exact_loop_of_fla(op, in_float64) -> None:
    x = draw(11)
    y, last = op(**x, chunk_size=4)
    before = parts(x["initial_state"])
    naive = peer("fla/ops/mesa_net/naive.py").naive_mesa_net_exact
    theirs, *end = naive(x["q"], x["k"], x["v"], x["log_a"], x["ridge"], x["beta"], *before)
    agree([y, last], [theirs, torch.cat(end, -1)], x)


def test_against_the_steps_of_fla(in_float64) -> None:
    """Its divisions are guarded by 1e-5, which keeps it from the last digits: values only, and to that."""
    x = {name: z.detach() for name, z in draw(12).items()}
    naive = peer("fla/ops/mesa_net/naive.py").naive_mesa_net_CG
    theirs, *end = naive(x["q"], x["k"], x["v"], x["log_a"], x["ridge"], x["beta"], 4, 30, *parts(x["initial_state"]))
    y, last = mesa_chunked(**x, chunk_size=4)
    torch.testing.assert_close(y, theirs, rtol=0, atol=5e-3)
    torch.testing.assert_close(last, torch.cat(end, -1), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("op", FORMS)
def test_it_is_the_least_squares_fit(op) -> None:
    """By torch.linalg.lstsq over the weighted tokens so far, the ridge written as rows of its own."""
    x = draw(9, b=1)
    x["initial_state"] = None
    y, _ = op(**x, chunk_size=4)
    for t in range(9):
        for h in range(H):
            decayed = x["log_a"][0, 1 : t + 1, h].flip(0).cumsum(0).flip(0)
            weight = (x["beta"][0, : t + 1, h] * torch.cat([decayed, decayed.new_zeros(1)]).exp()).sqrt()[:, None]
            rows = torch.cat([x["k"][0, : t + 1, h] * weight, torch.diag(x["ridge"][h].sqrt())])
            goals = torch.cat([x["v"][0, : t + 1, h] * weight, torch.zeros(4, 4, dtype=torch.float64)])
            fit = torch.linalg.lstsq(rows, goals).solution
            torch.testing.assert_close(y[0, t, h], x["q"][0, t, h] @ fit, rtol=1e-9, atol=1e-9)


def test_gradcheck() -> None:
    x = draw(3, b=1, n=2, p=2)
    names = list(x)

    def symmetric(z):
        z = dict(zip(names, z, strict=True))
        keys, values = z["initial_state"][..., :2], z["initial_state"][..., 2:]
        return {**z, "initial_state": torch.cat([(keys + keys.mT) / 2, values], -1)}

    for op in FORMS:
        assert torch.autograd.gradcheck(lambda *z, op=op: op(**symmetric(z), chunk_size=2, n_steps=4), tuple(x.values()))


@pytest.mark.parametrize("chunk_size", [1, 3, 16, 64])
def test_every_chunk_size_is_the_same(chunk_size: int) -> None:
    x, segments = draw(41, b=6), random_segments(4, 6, 41)
    found = mesa_chunked(**x, segments=segments, chunk_size=chunk_size)
    agree(found, mesa_reference(**x, segments=segments), x)


@pytest.mark.parametrize(("n", "steps", "error"), [(16, 16, 1e-4), (16, 8, 0.05), (64, 30, 2e-3)])
def test_steps_and_what_they_leave(n: int, steps: int, error: float) -> None:
    x = {name: z.detach() for name, z in draw(300, b=1, n=n, p=8, decay=0.01).items()}
    x["initial_state"] = None
    expected, _ = mesa_reference(**x)
    found, _ = mesa_chunked(**x, n_steps=steps)
    assert float((found - expected).norm() / expected.norm()) < error


@pytest.mark.parametrize("decay", [0.0, 1e-3, 60.0])
def test_long_inputs_in_float32(decay: float) -> None:
    x = {name: z.detach() for name, z in draw(2000, b=1, n=8, p=8, decay=decay).items()}
    expected, last = mesa_reference(**x)
    found, state = mesa_chunked(**{name: z.float() for name, z in x.items()})
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(state.double(), last, rtol=1e-3, atol=1e-3)


def test_a_solution_stays_where_nothing_is_left() -> None:
    """Zeros, tiny and huge numbers: many more steps than there are directions."""
    matrix = torch.diag(torch.tensor([1.0, 3.0, 100.0]))
    right = torch.tensor([[0.0, 0.0, 0.0], [1e-15, 0.0, 1e-15], [1e15, 1e15, 1e15], [1.0, 0.0, 0.0]])
    found = conjugate_gradients(lambda x: x @ matrix, right, 200)
    torch.testing.assert_close(found, right / torch.diag(matrix), rtol=1e-4, atol=0)


@pytest.mark.parametrize("packed", [False, True])
def test_the_operators_are_well_formed(packed: bool) -> None:
    from hybridtf.ops.mesa.chunked import _op

    x, s = [z.detach() for z in draw(9, b=4).values()], random_segments(9, 4, 9)
    check_operators(_op, arguments(x[:6], s if packed else None, (4, 6)), [x[6]])


def test_a_compiler_sees_one_call() -> None:
    x = draw(11)
    names = list(x)
    compiled = torch.compile(
        lambda *z: mesa_chunked(**dict(zip(names, z, strict=True)), chunk_size=4), backend="aot_eager", fullgraph=True
    )
    agree(compiled(*x.values()), mesa_chunked(**x, chunk_size=4), x)


def test_calls_grow_with_chunks_alone() -> None:
    from hybridtf.ops.mesa.chunked import _span
    from hybridtf.ops.passes_op import Call

    counts = []
    for t in (512, 4096):
        x = {name: z.detach() for name, z in draw(t, b=1).items()}
        call = Call(
            {n: x[n] for n in ("q", "k", "v", "beta", "log_a")}, {"ridge": x["ridge"]}, {"chunk_size": 64, "n_steps": 30}, None
        )
        with Peak() as mode:
            _span(call, (x["initial_state"],))
        counts.append(mode.calls)
    assert (counts[1] - counts[0]) / (64 - 8) <= 4  # the walk over chunks; the steps are those of a span
    assert counts[0] < 700


def test_what_does_not_fit_is_refused() -> None:
    x = {name: z.detach() for name, z in draw(3).items()}
    for op in FORMS:
        with pytest.raises(ConfigError, match="mesa: q and k must be"):
            op(**{**x, "k": x["k"][..., :2]})
        with pytest.raises(ConfigError, match=r"mesa: beta must be \(2, 3, 2\); got \(2, 3, 1\)"):
            op(**{**x, "beta": x["beta"][..., :1]})
        with pytest.raises(ConfigError, match=r"mesa: initial_state must be \(2, 2, 4, 8\); got \(2, 2, 4, 4\)"):
            op(**{**x, "initial_state": x["initial_state"][..., :4]})
        with pytest.raises(ConfigError, match="mesa: n_steps must be 1 or more; got 0"):
            op(**x, n_steps=0)


def test_second_derivatives_are_those_of_the_reference() -> None:
    x = draw(5)
    (first,) = torch.autograd.grad(mesa_chunked(**x)[0].sum(), [x["k"]], create_graph=True)
    with pytest.raises(KernelError, match="mesa: kernel 'chunked'"):
        first.sum().backward()
