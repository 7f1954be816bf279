"""``gla`` against other people's loops, at its limits of precision, under the compiler, and by its count of calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError, KernelError
from hybridtf.core.segments import Segments
from hybridtf.interop.strict import StrictFloat64
from hybridtf.ops.gla import chunked, gla_chunked, gla_combine, gla_reference, gla_summary
from hybridtf.ops.gla.spans import gla_span
from hybridtf.ops.passes_op import Call
from tests.ops.live_bytes import Peak
from tests.ops.operators import arguments, check_operators
from tests.ops.ssd_cases import random_segments
from tests.peers import peer

OPS = (gla_reference, gla_chunked)


def draw(
    b: int, t: int, g: int = 2, h: int = 2, n: int = 5, p: int = 3, *, decay: float = 0.5, dtype: torch.dtype = torch.float64,
    values: bool = False,
) -> list[Tensor]:
    """q, k, v, log_a and the incoming state."""
    gen = torch.Generator().manual_seed(17 * t + n)
    shapes = ((b, t, h, n), (b, t, g, n), (b, t, g, p), (b, t, g, p if values else n), (b, g, n, p))
    q, k, v, log_a, state = (torch.randn(s, generator=gen, dtype=torch.float64) for s in shapes)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, -log_a.abs() * decay, state)]


def run(op, x: list[Tensor], **more) -> tuple[Tensor, Tensor]:
    return op(*x[:4], initial_state=x[4], **more)


def with_grads(out, x: list[Tensor]) -> list[Tensor]:
    gen = torch.Generator().manual_seed(3)
    loss = sum((z.double() * torch.randn(z.shape, generator=gen, dtype=torch.float64)).sum() for z in out)
    return [*out, *torch.autograd.grad(loss, x, allow_unused=True, materialize_grads=True)]


def same(found, expected, tol: float = 1e-11) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@pytest.mark.parametrize("op", OPS)
def test_equals_flas_loop_for_gla(op) -> None:
    naive = peer("fla/ops/gla/naive.py").naive_recurrent_gla
    x = draw(2, 13, h=2)
    with StrictFloat64():
        theirs = naive(*x[:4], initial_state=x[4], output_final_state=True)
    expected = with_grads((theirs[0] * 5**0.5, theirs[1]), x)  # they scale queries
    same(with_grads(run(op, x), x), expected)


@pytest.mark.parametrize("op", OPS)
def test_equals_flas_loop_for_rwkv6(op) -> None:
    naive = peer("fla/ops/rwkv6/recurrent_naive.py").naive_recurrent_rwkv6
    x = draw(2, 13)
    bonus = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    first = [z.transpose(1, 2) for z in x[:4]]
    with StrictFloat64():
        theirs = naive(*first, bonus, scale=1.0, initial_state=x[4], output_final_state=True)
    expected = with_grads((theirs[0].transpose(1, 2), theirs[1]), [*x, bonus])
    same(with_grads(run(op, x, bonus=bonus), [*x, bonus]), expected)


@pytest.mark.parametrize("op", OPS)
def test_equals_flas_loop_for_gated_slots(op) -> None:
    """Two passes, decay of values and then of keys, with a softmax between; one state for two heads of queries."""
    naive = peer("fla/ops/gsa/naive.py").naive_recurrent_gsa
    q, k, slots, log_a, _ = draw(2, 13, h=4, n=5, p=6, values=True)
    v = torch.randn(2, 13, 2, 3, dtype=torch.float64, requires_grad=True)
    x = [q, k, v, slots, log_a]
    with StrictFloat64():
        theirs, _ = naive(q, k, v, slots, log_a, scale=1.0)
    scores, _ = op(q, k, slots, log_a, decay="values")
    ours, _ = op(scores.softmax(-1), slots, v, log_a)
    same(with_grads((ours,), x), with_grads((theirs,), x))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("bonus", [False, True])
def test_gradcheck(op, values: bool, bonus: bool) -> None:
    x = draw(2, 6, g=1, h=2, n=2, p=3, values=values)
    u = torch.randn(2, 2, dtype=torch.float64, requires_grad=True) if bonus else None
    segments = Segments.from_ids(torch.tensor([[0, 1, 0, 1, 2, 2], [4, 4, 0, 6, 6, 0]]), continues=True)
    options = {"segments": segments, "chunk_size": 4, "decay": "values" if values else "keys"}
    f = lambda *a: op(*a[:4], initial_state=a[4], bonus=a[5] if bonus else None, **options)  # noqa: E731
    assert torch.autograd.gradcheck(f, (*x, u) if bonus else tuple(x))


@pytest.mark.parametrize("decay", ["keys", "values"])
@pytest.mark.parametrize("t", [1, 64, 97])
def test_strong_and_weak_channels_together_stay_exact(t: int, decay: str) -> None:
    """What breaks exp(c_i) exp(-c_j): a channel that forgets all beside one that forgets nothing, and -inf itself."""
    x = draw(2, t, n=6, p=6, dtype=torch.float32)
    rates = torch.tensor([-1e-4, -0.5, -20.0, -100.0, -1e4, -torch.inf])
    with torch.no_grad():
        x[3].copy_(rates)
        x[3][:, t // 2 :] = x[3][:, t // 2 :].flip(-1)
    exact = [z.detach().double().requires_grad_() for z in x]
    found = with_grads(run(gla_chunked, x, decay=decay), x)
    expected = with_grads(run(gla_reference, exact, decay=decay), exact)
    for a, b in zip(found, expected, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5)


def test_every_token_forgets_all() -> None:
    x = draw(1, 70)
    with torch.no_grad():
        x[3].fill_(-torch.inf)
    for op in OPS:
        y, state, *grads = with_grads(run(op, x), x)
        torch.testing.assert_close(y, (x[0] * x[1]).sum(-1, keepdim=True) * x[2], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state, x[1][:, -1, :, :, None] * x[2][:, -1, :, None, :])
        assert all(g.isfinite().all() for g in grads)
        assert not grads[3].any()


def test_long_and_weak_decay_does_not_drift() -> None:
    """Each exp(log_a) alone rounds to 1 in float32; what is kept of the first token after all of them does not."""
    t = 2**14
    q, k, v = (torch.zeros(1, t, 1, 1) for _ in range(3))
    k[:, 0], v[:, 0], q[:, -1] = 1.0, 1.0, 1.0
    log_a = torch.full((1, t, 1, 1), -1e-8)
    y, state = gla_chunked(q, k, v, log_a)
    kept = torch.tensor(-1e-8 * (t - 1), dtype=torch.float64).exp()
    assert abs(float(y[0, -1].double() - kept)) < 5e-6
    assert abs(float(state.double() - kept)) < 5e-6
    assert float(state) != 1.0


def test_float32_stays_near_float64_over_a_long_input() -> None:
    x = draw(1, 1500, n=8, p=8, decay=0.05, dtype=torch.float32)
    exact = [z.detach().double().requires_grad_() for z in x]
    found, expected = with_grads(run(gla_chunked, x), x), with_grads(run(gla_chunked, exact), exact)
    for a, b in zip(found, expected, strict=True):
        assert float((a.double() - b).detach().norm() / b.detach().norm()) < 3e-6


def test_low_precision_is_rounded_only_at_the_end() -> None:
    for dtype, tol in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        x = draw(1, 130, n=8, p=8, decay=0.2, dtype=dtype)
        y, state = run(gla_chunked, [z.detach() for z in x])
        exact, exact_state = run(gla_chunked, [z.detach().double() for z in x])
        assert y.dtype == dtype
        assert state.dtype == torch.float32
        assert float((state.double() - exact_state).norm() / exact_state.norm()) < 1e-6
        assert float((y.double() - exact).norm() / exact.norm()) < tol


@pytest.mark.parametrize("decay", ["keys", "values"])
def test_summaries_of_parts_combine_to_the_final_state(decay: str) -> None:
    x = draw(4, 23, values=decay == "values")
    s = random_segments(5, 4, 23)
    _, last = run(gla_reference, x, segments=s, decay=decay)
    total = None
    for start, stop in ((0, 7), (7, 8), (8, 8), (8, 23)):
        part = gla_summary(*(z[:, start:stop] for z in x[1:4]), segments=s.narrow(start, stop), decay=decay)
        total = part if total is None else gla_combine(total, part)
    assert total is not None
    torch.testing.assert_close(total[0] * x[4] + total[1], last, rtol=1e-11, atol=1e-11)


def test_calls_grow_with_chunks_and_memory_with_length() -> None:
    def peak(t: int) -> Peak:
        x = [z.detach() for z in draw(1, t, n=16, p=16, dtype=torch.float32)]
        with torch.no_grad(), Peak() as seen:
            gla_chunked(*x[:4], chunk_size=64)
        return seen

    def calls(t: int) -> int:  # below the operator, so that what is inside is counted
        q, k, v, log_a, state = (z.detach() for z in draw(1, t, n=16, p=16))
        timed = {"q": q, "k": k, "v": v, "log_a": log_a}
        with Peak() as seen:
            gla_span(Call(timed, {"bonus": None}, {"chunk_size": 64, "of_values": False}, None), (state,))
        return seen.calls

    assert calls(4096) - calls(512) <= 4 * (4096 - 512) // 64
    assert peak(8192).most < 2.2 * peak(4096).most


def test_the_operators_are_well_formed() -> None:
    x = [z.detach() for z in draw(4, 9)]
    bonus = torch.randn(2, 5, dtype=torch.float64)
    s = random_segments(9, 4, 9)
    for segments, u in ((None, None), (s, bonus)):
        check_operators(chunked._op, arguments((*x[:4], u), segments, (4, False)), [x[4]])


def test_one_graph_serves_all_lengths() -> None:
    f = lambda x, u: run(gla_chunked, x, bonus=u, chunk_size=4)  # noqa: E731
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)
    u = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    for t in (9, 14, 21):
        x = draw(2, t)
        same(with_grads(compiled(x, u), [*x, u]), with_grads(run(gla_reference, x, bonus=u), [*x, u]), 1e-9)


def test_second_derivatives_are_the_references() -> None:
    x = draw(1, 5)
    (first,) = torch.autograd.grad(run(gla_chunked, x)[0].square().sum(), x[0], create_graph=True)
    with pytest.raises(KernelError, match="second derivatives"):
        torch.autograd.grad(first.sum(), x[0])
    (first,) = torch.autograd.grad(run(gla_reference, x)[0].square().sum(), x[0], create_graph=True)
    assert torch.autograd.grad(first.sum(), x[0])[0].isfinite().all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": (2, 5, 3, 4)}, r"k must be \(b t g k\)"),
        ({"q": (2, 5, 3, 4)}, "h a multiple of 2"),
        ({"log_a": (2, 5, 2, 3)}, r"log_a must be \(b t g keys\)"),
        ({"bonus": (2, 4)}, r"bonus must be \(h k\) = \(4, 4\)"),
        ({"initial_state": (2, 2, 3, 4)}, "initial_state"),
        ({"chunk_size": 0}, "chunk_size must be 1 or more"),
        ({"decay": "value"}, "Did you mean 'values'"),
    ],
)
def test_what_does_not_fit_is_refused(change, words: str) -> None:
    shapes = {"q": (2, 5, 4, 4), "k": (2, 5, 2, 4), "v": (2, 5, 2, 3), "log_a": (2, 5, 2, 4), **change}
    given = {name: torch.zeros(value) if isinstance(value, tuple) else value for name, value in shapes.items()}
    for op in OPS:
        with pytest.raises(ConfigError, match=words):
            op(**given)
