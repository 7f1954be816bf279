"""``ttt_linear`` against autograd and fla's plain loop, at extreme numbers, and as an operator; the kit holds it to its
reference where states and documents come in."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core.errors import ConfigError, KernelError
from hybridtf.interop.strict import StrictFloat64
from hybridtf.ops.ttt import CASES, ttt_linear_chunked, ttt_linear_reference
from tests.ops.live_bytes import Peak
from tests.ops.operators import check_operators
from tests.ops.ssd_cases import random_segments
from tests.peers import peer

FORMS = (ttt_linear_reference, ttt_linear_chunked)
FIXED = ("norm_weight", "norm_bias", "W0", "b0", "scale")
MEMORY = ("W", "dW")
H, P, M = 2, 3, 4


def draw(t: int, *, b: int = 2, m: int = M, speed: float = 0.5, p: int = P):
    gen = torch.Generator().manual_seed(t)
    shapes = {"q": (b, t, H, p), "k": (b, t, H, p), "v": (b, t, H, p), "lr": (b, t, H)}
    shapes |= {"norm_weight": (H, p), "norm_bias": (H, p), "W0": (H, p, p), "b0": (H, p)}
    x = {name: torch.randn(shape, generator=gen, dtype=torch.float64) for name, shape in shapes.items()}
    x["lr"] = torch.sigmoid(x["lr"]) * speed
    x["scale"] = 1 / torch.arange(1, m + 1, dtype=torch.float64)
    return {name: z.requires_grad_() for name, z in x.items()}


def results(out):
    return [out[0], *(out[1][name] for name in MEMORY)]


def gradients(out, given):
    loss = sum((z.double() * torch.linspace(1, 2, z.numel(), dtype=torch.float64).view_as(z)).sum() for z in out)
    return torch.autograd.grad(loss, given, retain_graph=True)


def agree(found, expected, x, *, tol: float = 1e-10) -> None:
    given = list(x.values())
    pairs = zip([*found, *gradients(found, given)], [*expected, *gradients(expected, given)], strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def by_autograd(x, eps: float):
    """The paper's sentence as it stands: each token's loss differentiated by torch, at its mini-batch's weights."""
    ys, m = [], len(x["scale"])
    for row in range(x["q"].shape[0]):
        for head in range(H):
            W, b = x["W0"][head], x["b0"][head]
            normal = [x[name][head] for name in ("norm_weight", "norm_bias")]
            for start in range(0, x["q"].shape[1], m):
                dW, db = torch.zeros_like(W), torch.zeros_like(b)
                for i, t in enumerate(range(start, min(start + m, x["q"].shape[1]))):
                    q, k, v, lr = (x[name][row, t, head] for name in ("q", "k", "v", "lr"))
                    loss = (F.layer_norm(k @ W + b, (P,), *normal, eps) - (v - k)).square().sum() / 2
                    of_W, of_b = torch.autograd.grad(loss, (W, b), create_graph=True)
                    dW, db = dW + lr * of_W, db + lr * of_b
                    W_t, b_t = W - x["scale"][i] * dW, b - x["scale"][i] * db
                    ys.append(q + F.layer_norm(q @ W_t + b_t, (P,), *normal, eps))
                W, b = W_t, b_t
    return torch.stack(ys).view(x["q"].shape[0], H, -1, P).transpose(1, 2)


@pytest.mark.parametrize("op", FORMS)
@pytest.mark.parametrize("t", [2, 11])
def test_the_gradient_inside_is_the_one_that_autograd_finds(op, t: int) -> None:
    x = draw(t)
    agree([op(**x, eps=0.01)[0]], [by_autograd(x, 0.01)], x)


@pytest.mark.parametrize("op", FORMS)
def test_against_the_loop_of_fla(op) -> None:
    """fla's rates are of the query's place alone, its queries are scaled, and what it adds the norm to is the read-out z, not
    the query (the paper: f(x) = x + norm(z)): z and the state are the same."""
    t, eps = 3 * M, 0.01
    x = draw(t)
    del x["lr"]
    ones = torch.ones(2, t, H, dtype=torch.float64)
    y, state = op(**x, lr=ones, eps=eps)
    rates = x["scale"].repeat(3)[None, :, None, None].expand(2, -1, H, 1).clone()
    before = (x["W0"].expand(2, -1, -1, -1), x["b0"][:, None].expand(2, -1, -1, -1))
    with StrictFloat64():
        theirs, W, b = peer("fla/ops/ttt/naive.py").chunk_ttt_linear_ref(
            x["q"] * 1, x["k"], x["v"], x["norm_weight"], x["norm_bias"], rates, 1.0, eps, M, *before, True
        )
    z = theirs - (y - x["q"])  # if it is the same z, its norm is what we added to the query
    normed = F.layer_norm(z, (P,), None, None, eps) * x["norm_weight"] + x["norm_bias"]
    found = [y - x["q"], state["W"][..., :P, :] + x["W0"], state["W"][..., P, :] + x["b0"]]
    agree(found, [normed, W, b[:, :, 0]], x)


def test_gradcheck() -> None:
    x = draw(5, b=1, m=2, p=2)
    for op in FORMS:
        run = lambda *z, op=op: results(op(**dict(zip(x, z, strict=True)), eps=0.1))  # noqa: E731
        assert torch.autograd.gradcheck(run, tuple(x.values()))


@pytest.mark.parametrize("t", [1, 3, 4, 16, 37, 200])
def test_without_a_state_mini_batches_are_chunks(t: int) -> None:
    """200 tokens of 128 heads are several spans."""
    x = draw(t, b=5 if t < 200 else 64, p=3 if t < 200 else 8)
    expected, found = ttt_linear_reference(**x, eps=0.1), ttt_linear_chunked(**x, eps=0.1)
    assert torch.equal(found[1]["n"], expected[1]["n"])
    agree(results(found), results(expected), x, tol=1e-9)


@pytest.mark.parametrize("m", [1, 3, 16, 50])
def test_documents_of_any_length(m: int) -> None:
    x, segments = draw(61, b=8, m=m), random_segments(5, 8, 61)
    expected, found = (op(**x, eps=0.1, segments=segments) for op in FORMS)
    assert torch.equal(found[1]["n"], expected[1]["n"])
    agree(results(found), results(expected), x, tol=1e-9)


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_long_inputs_in_float32(size: float) -> None:
    """Of any size: the norm sees to it. The layer's own rates are at most 1 / p for keys of size 1."""
    x = {name: z.detach() for name, z in draw(2000, b=1, m=16, p=8, speed=1 / 8).items()}
    for name in ("q", "k", "v"):
        x[name] *= size
    x["lr"] /= max(size, 1.0) ** 2
    expected, _ = ttt_linear_reference(**x)
    found, _ = ttt_linear_chunked(**{name: z.float() for name, z in x.items()})
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=2e-2)
    assert float((found.double() - expected).abs().mean()) < 1e-4 * max(size, 1.0)


def test_equal_channels_have_finite_gradients() -> None:
    """Zeros everywhere: the variance inside the norm is 0."""
    x = {name: torch.zeros_like(z).requires_grad_() if z.ndim == 4 else z for name, z in draw(9).items()}
    x["W0"] = torch.zeros_like(x["W0"]).requires_grad_()
    for op in FORMS:
        out = results(op(**x))
        assert all(bool(z.isfinite().all()) for z in (*out, *gradients(out, list(x.values()))))


def operator_inputs(aligned: bool):
    from hybridtf.ops.ttt.chunked import _op

    x, s = {name: z.detach() for name, z in draw(9, b=4).items()}, random_segments(9, 4, 9)
    masks = (None, None, None) if aligned else (s.real, s.effective, s.carried)
    place = (torch.arange(9).expand(4, -1) if aligned else s.position) % M
    timed = [x[name] for name in ("q", "k", "v", "lr")]
    state = [torch.zeros(4, H, P + 1, P, dtype=torch.float64) for _ in range(2)]
    fixed = [x[name] for name in FIXED]
    return _op, (*timed, x["scale"][place], place.double(), *fixed, *masks, 0.1, aligned), state


@pytest.mark.parametrize("aligned", [False, True])
def test_the_operators_are_well_formed(aligned: bool) -> None:
    op, given, state = operator_inputs(aligned)
    check_operators(op, given, state)


def test_a_compiler_sees_one_call() -> None:
    x = draw(11)
    compiled = torch.compile(
        lambda *z: results(ttt_linear_chunked(**dict(zip(x, z, strict=True)), eps=0.1)), backend="aot_eager", fullgraph=True
    )
    agree(compiled(*x.values()), results(ttt_linear_chunked(**x, eps=0.1)), x)


@pytest.mark.parametrize(("aligned", "each"), [(True, 9), (False, 32)])
def test_calls_grow_with_mini_batches_alone(aligned: bool, each: int) -> None:
    from hybridtf.ops.passes_op import Call
    from hybridtf.ops.ttt.spans import span

    counts = []
    for t in (512, 4096):
        x = {name: z.detach() for name, z in draw(t, b=1, m=16).items()}
        place = (torch.arange(t) % 16)[None]
        timed = {**{n: x[n] for n in ("q", "k", "v", "lr")}, "rate": x["scale"][place], "place": place.double()}
        state = (torch.zeros(1, H, P + 1, P, dtype=torch.float64),) * 2
        with Peak() as mode:
            span(Call(timed, {n: x[n] for n in FIXED}, {"eps": 0.1, "aligned": aligned}, None), state)
        counts.append(mode.calls)
    assert (counts[1] - counts[0]) / (256 - 32) <= each


def test_what_does_not_fit_is_refused() -> None:
    x = {name: z.detach() for name, z in draw(3).items()}
    state = CASES[0].draw(torch.Generator(), 2, 3).state
    for op in FORMS:
        with pytest.raises(ConfigError, match=r"ttt_linear: q, k and v must be \(b t h p\) alike"):
            op(**{**x, "v": x["v"][:, :2]})
        with pytest.raises(ConfigError, match=r"ttt_linear: b0 must be \(2, 3\); got \(2, 2\)"):
            op(**{**x, "b0": x["b0"][:, :2]})
        with pytest.raises(ConfigError, match=r"ttt_linear: scale must be \(m\)"):
            op(**{**x, "scale": x["scale"][:0]})
        with pytest.raises(ConfigError, match="ttt_linear: initial_state must have W, dW and n; got W, n"):
            op(**x, initial_state={"W": state["W"], "n": state["n"]})
        with pytest.raises(ConfigError, match=r"ttt_linear: W must be \(2, 2, 4, 3\); got \(2, 2, 5, 4\)"):
            op(**x, initial_state=state)


def test_second_derivatives_are_those_of_the_reference() -> None:
    x = draw(5)
    (first,) = torch.autograd.grad(ttt_linear_chunked(**x)[0].sum(), [x["k"]], create_graph=True)
    with pytest.raises(KernelError, match="ttt_linear: kernel 'chunked'"):
        first.sum().backward()
