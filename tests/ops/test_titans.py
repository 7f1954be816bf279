"""``titans`` against autograd, fla's momentum delta rule and the memory of titans-pytorch, at extreme numbers, and as an
operator; the kit holds it to its reference where states and documents come in."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core.errors import ConfigError, KernelError
from hybridtf.interop.strict import StrictFloat64
from hybridtf.ops.titans import CASES, titans_chunked, titans_reference
from hybridtf.ops.titans.memory import layer_shapes, split
from tests.ops.live_bytes import Peak
from tests.ops.ssd_cases import random_segments
from tests.peers import peer
from tests.titans_pytorch import by_titans_pytorch

FORMS = (titans_reference, titans_chunked)
MEMORY = ("M", "S", "base")
TIMED = ("q", "k", "v", "theta", "log_eta", "log_a")
H, K, V, M, HIDDEN = 2, 3, 4, 4, 5


def draw(t: int, *, b: int = 2, depth: int = 1, k: int = K, v: int = V, h: int = H, speed: float = 0.1):
    """Arguments that are tensors; keys of length 1."""
    gen = torch.Generator().manual_seed(t)
    n = sum(rows * columns for rows, columns in layer_shapes(k, v, depth, HIDDEN))
    shapes = {"q": (b, t, h, k), "k": (b, t, h, k), "v": (b, t, h, v), **dict.fromkeys(TIMED[3:], (b, t, h)), "M0": (h, n)}
    x = {name: torch.randn(shape, generator=gen, dtype=torch.float64) for name, shape in shapes.items()}
    x["k"] = F.normalize(x["k"], dim=-1)
    x["theta"], x["M0"] = torch.sigmoid(x["theta"]) * speed, x["M0"] / 2
    x["log_eta"], x["log_a"] = F.logsigmoid(x["log_eta"]), F.logsigmoid(x["log_a"] + 2)
    return {name: z.requires_grad_() for name, z in x.items()}


def options(depth: int = 1, m: int = M):
    return {"mini_batch": m, "depth": depth, "d_hidden": HIDDEN}


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


def by_autograd(x, m: int, depth: int):
    """The paper's equations as they stand: the loss of each token differentiated by torch, at its mini-batch's weights."""
    ys, shapes = [], layer_shapes(K, V, depth, HIDDEN)
    for row in range(x["q"].shape[0]):
        for head in range(H):
            base = memory = split(x["M0"][head], shapes)
            momentum = [torch.zeros_like(layer) for layer in memory]
            for t in range(x["q"].shape[1]):
                base = memory if t % m == 0 else base
                q, k, v, theta, log_eta, log_a = (x[name][row, t, head] for name in TIMED)
                found = torch.autograd.grad((applied(base, k) - v).square().sum(), base, create_graph=True)
                momentum = [log_eta.exp() * S - theta * g for S, g in zip(momentum, found, strict=True)]
                alpha = 1 - log_a.exp()
                memory = [(1 - alpha) * layer + S for layer, S in zip(memory, momentum, strict=True)]
                ys.append(applied(memory, q))
    return torch.stack(ys).view(x["q"].shape[0], H, -1, V).transpose(1, 2)


def applied(layers, x):
    for layer in layers[:-1]:
        x = F.gelu(x @ layer)
    return x @ layers[-1]


@pytest.mark.parametrize("op", FORMS)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("t", "m"), [(2, 4), (7, 1), (11, 4)])
def test_the_gradient_inside_is_the_one_that_autograd_finds(op, depth: int, t: int, m: int) -> None:
    x = draw(t, depth=depth)
    agree([op(**x, **options(depth, m))[0]], [by_autograd(x, m, depth)], x)


@pytest.mark.parametrize("op", FORMS)
def test_a_matrix_without_delay_is_the_momentum_delta_rule_of_fla(op) -> None:
    """Theirs steps by eta k (k S - v), half the gradient, and its momentum has the other sign."""
    x = draw(13)
    n = torch.zeros(2, dtype=torch.int64)
    before = {name: torch.randn(2, H, K * V, dtype=torch.float64, requires_grad=True) for name in ("M", "S")}
    y, state = op(**x, **options(m=1), initial_state={**before, "base": before["M"], "n": n})
    with StrictFloat64():
        theirs, (memory, momentum) = peer("fla/ops/momentum_delta_rule/naive.py").recurrent_momentum_delta_rule_ref(
            x["q"], x["k"], x["v"], log_alpha=x["log_a"], log_mu=x["log_eta"], p=x["k"], beta=torch.ones_like(x["theta"]),
            eta=2 * x["theta"], scale=1.0, initial_S=(before["M"] + x["M0"]).view(2, H, K, V),
            initial_M=-before["S"].view(2, H, K, V), output_final_state=True,
        )
    found = [y, state["M"] + x["M0"], state["S"]]
    agree(found, [theirs, memory.flatten(-2), -momentum.flatten(-2)], {**x, **before})


@pytest.mark.parametrize("op", FORMS)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("m", [1, 3, 4])
def test_against_the_memory_of_titans_pytorch(op, depth: int, m: int) -> None:
    x = draw(11, depth=depth, v=K)
    y, state = op(**x, **options(depth, m))
    layers = split(x["M0"], layer_shapes(K, K, depth, HIDDEN))
    agree([y, state["M"] + x["M0"], state["S"]], by_titans_pytorch(*(x[name] for name in TIMED), layers, m), x)


@pytest.mark.parametrize("depth", [1, 2])
def test_gradcheck(depth: int) -> None:
    x = draw(5, b=1, h=1, k=2, v=2, depth=depth)
    for op in FORMS:
        run = lambda *z, op=op: results(op(**dict(zip(x, z, strict=True)), **options(depth, 2)))  # noqa: E731
        assert torch.autograd.gradcheck(run, tuple(x.values()))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("t", [1, 3, 4, 16, 37, 200])
def test_without_a_state_mini_batches_are_chunks(t: int, depth: int) -> None:
    """200 tokens of 128 heads are several spans."""
    x = draw(t, b=5 if t < 200 else 64, k=3 if t < 200 else 24, depth=depth, speed=0.03)
    expected, found = (op(**x, **options(depth)) for op in FORMS)
    assert torch.equal(found[1]["n"], expected[1]["n"])
    agree(results(found), results(expected), x, tol=1e-9)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("m", [1, 3, 16, 50])
def test_documents_of_any_length(m: int, depth: int) -> None:
    x, segments = draw(61, b=8, depth=depth, speed=0.1 / m), random_segments(5, 8, 61)
    expected, found = (op(**x, **options(depth, m), segments=segments) for op in FORMS)
    assert torch.equal(found[1]["n"], expected[1]["n"])
    agree(results(found), results(expected), x, tol=1e-9)


@pytest.mark.parametrize("depth", [1, 2])
def test_long_inputs_in_float32(depth: int) -> None:
    x = {name: z.detach() for name, z in draw(2000, b=1, k=8, v=8, depth=depth, speed=1 / 32).items()}
    x["log_a"] *= 0.05  # forgetting that reaches far
    expected, _ = titans_reference(**x, **options(depth, 16))
    found, _ = titans_chunked(**{name: z.float() for name, z in x.items()}, **options(depth, 16))
    assert float(expected.abs().max()) < 100
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_gates_that_close_have_finite_gradients() -> None:
    """Everything is forgotten at once, in the memory or in the momentum: logarithms of 0, and such that no exponent reaches."""
    for name in ("log_eta", "log_a"):
        for value in (-torch.inf, -1e30):
            x = draw(9, depth=2)
            x[name] = torch.full_like(x[name], value).requires_grad_()
            expected, found = (results(op(**x, **options(2))) for op in FORMS)
            agree(found, expected, x)
            assert all(bool(z.isfinite().all()) for z in (*found, *gradients(found, list(x.values()))))


def operator_inputs(aligned: bool):
    from hybridtf.ops.titans.chunked import _op

    x, s = {name: z.detach() for name, z in draw(9, b=4, depth=2).items()}, random_segments(9, 4, 9)
    masks = (None, None, None) if aligned else (s.real, s.effective, s.carried)
    place = (torch.arange(9).expand(4, -1) if aligned else s.position) % M
    state = [torch.zeros(4, *x["M0"].shape, dtype=torch.float64) for _ in range(3)]
    return _op, (*(x[name] for name in TIMED), place.double(), x["M0"], *masks, M, 2, HIDDEN, aligned), state


@pytest.mark.parametrize("aligned", [False, True])
def test_the_operators_are_well_formed(aligned: bool) -> None:
    op, given, state = operator_inputs(aligned)
    torch.library.opcheck(op.forward_op, (*given, state, True))
    y, last, starts = op.forward_op(*given, state, True)
    torch.library.opcheck(op.backward_op, (*given, starts, torch.randn_like(y), [torch.randn_like(z) for z in last]))


def test_a_compiler_sees_one_call() -> None:
    x = draw(11, depth=2)
    compiled = torch.compile(
        lambda *z: results(titans_chunked(**dict(zip(x, z, strict=True)), **options(2))), backend="aot_eager", fullgraph=True
    )
    agree(compiled(*x.values()), results(titans_chunked(**x, **options(2))), x)


@pytest.mark.parametrize(
    ("depth", "begins", "each"),
    [
        (1, "together", 23), (1, "anywhere", 39), (1, "documents", 53),
        (2, "together", 48), (2, "anywhere", 79), (2, "documents", 110),
    ],
)
def test_calls_grow_with_mini_batches_alone(depth: int, begins: str, each: int) -> None:
    from hybridtf.ops.passes_op import Call, Masks
    from hybridtf.ops.titans.spans import span

    counts = []
    for t in (512, 4096):
        x = {name: z.detach() for name, z in draw(t, b=1, depth=depth).items()}
        timed = {**{name: x[name] for name in TIMED}, "place": (torch.arange(t) % 16)[None].double()}
        state = (torch.zeros(1, *x["M0"].shape, dtype=torch.float64),) * 3
        ids = torch.ones(1, t, dtype=torch.int64)
        masks = Masks(ids > 0, ids, ids[:, 0]) if begins == "documents" else None
        with Peak() as mode:
            span(Call(timed, {"M0": x["M0"]}, {**options(depth, 16), "aligned": begins == "together"}, masks), state)
        counts.append(mode.calls)
    assert (counts[1] - counts[0]) / (256 - 32) <= each


def test_what_does_not_fit_is_refused() -> None:
    x = {name: z.detach() for name, z in draw(3).items()}
    state = CASES[0].draw(torch.Generator(), 2, 3).state
    for op in FORMS:
        with pytest.raises(ConfigError, match=r"titans: q and k must be \(b t h k\), v \(b t h v\)"):
            op(**{**x, "v": x["v"][:, :2]}, **options())
        with pytest.raises(ConfigError, match=r"titans: log_a must be \(2, 3, 2\); got \(2, 2, 2\)"):
            op(**{**x, "log_a": x["log_a"][:, :2]}, **options())
        with pytest.raises(ConfigError, match=r"titans: M0 must be \(2, 35\); got \(2, 12\)"):
            op(**x, **options(2))
        with pytest.raises(ConfigError, match="titans: mini_batch must be 1 or more"):
            op(**x, **options(m=0))
        with pytest.raises(ConfigError, match="titans: d_hidden must be 1 or more with depth = 2; got 0"):
            op(**x, mini_batch=4, depth=2)
        with pytest.raises(ConfigError, match="titans: initial_state must have M, S, base and n; got M, n"):
            op(**x, **options(), initial_state={"M": state["M"], "n": state["n"]})
        with pytest.raises(ConfigError, match=r"titans: S must be \(2, 2, 12\); got \(2, 2, 11\)"):
            op(**x, **options(), initial_state={**state, "S": state["S"][..., 1:]})


def test_second_derivatives_are_those_of_the_reference() -> None:
    x = draw(5)
    (first,) = torch.autograd.grad(titans_chunked(**x, **options())[0].sum(), [x["k"]], create_graph=True)
    with pytest.raises(KernelError, match="titans: kernel 'chunked' has no second derivatives"):
        first.sum().backward()
