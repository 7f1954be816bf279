"""``linear_scan``: every form against the reference, and the reference against code written another way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtf.core import ConfigError, KernelSet, Segments
from hybridtf.ops.linear_scan import KERNELS, linear_scan_chunked, linear_scan_reference
from hybridtf.ops.linear_scan.spans import spans_for
from tests.ops.linear_scan_cases import FORMS, Inputs, assert_same, call, inputs, number
from tests.ops.ssd_cases import random_segments

LENGTHS = (0, 1, 2, 3, 7, 17, 32, 61)


@pytest.fixture(params=[1, 6, 40], ids=lambda n: f"span{n}")
def span(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Spans of this many tokens."""
    monkeypatch.setattr("hybridtf.ops.linear_scan.spans.SPAN_TOKENS", request.param)
    monkeypatch.setattr("hybridtf.ops.spans.SPAN_BUDGET", 1)
    return int(request.param)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_chunked_equals_reference(form, packed: bool, span: int) -> None:
    for t in LENGTHS:
        x = inputs(t, 4, t, 3, pair=form[0], log=form[1], timeless=form[2])
        segments = random_segments(10 * t + span, 4, t) if packed else None
        assert_same(x, *(call(op, x, segments=segments) for op in (linear_scan_chunked, linear_scan_reference)))


def by_numbers(x: Inputs) -> tuple[Tensor, Tensor]:
    """All states and the last one by complex arithmetic, from products of factors written out: nothing shared."""
    def whole(parts: tuple[Tensor, ...]) -> Tensor:
        return torch.complex(parts[0], parts[1] if len(parts) == 2 else torch.zeros_like(parts[0]))

    u, decay, state = (whole(part) for part in x[:3])
    a = (decay.exp() if x.log else decay).expand(u.shape)
    rows = []
    for i in range(u.shape[1]):
        row = a[:, : i + 1].prod(1) * state
        for j in range(i + 1):
            row = row + a[:, j + 1 : i + 1].prod(1) * u[:, j]
        rows.append(row)
    return torch.stack(rows, 1), rows[-1]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_reference_equals_sums_of_products(form) -> None:
    x = inputs(5, 2, 9, 2, 3, pair=form[0], log=form[1], timeless=form[2])
    h, last = by_numbers(x)
    n = 2 if form[0] else 1
    expected = (*(h.real, h.imag)[:n], *(last.real, last.imag)[:n])
    assert_same(x, call(linear_scan_reference, x), expected, 1e-11)
    assert_same(x, call(linear_scan_chunked, x), expected, 1e-11)


def test_equals_the_filter_of_scipy() -> None:
    signal = pytest.importorskip("scipy.signal")
    u = torch.randn(2, 50, 3, dtype=torch.float64)
    for a in (0.7, -0.95, 0.0, 1.0, -1.0):
        want = torch.from_numpy(signal.lfilter([1.0], [1.0, -a], u.numpy(), axis=1))
        got, _ = linear_scan_chunked(u, a=torch.full((3,), a, dtype=torch.float64))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_equals_the_recurrence_of_a_gru_with_a_shut_reset() -> None:
    """minGRU: torch's GRU whose gates see the input alone, with the candidate made linear by hand: a = z, u = (1 - z) n."""
    cell = torch.nn.GRU(3, 4, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        for p in (cell.weight_hh_l0, cell.bias_hh_l0):
            p.zero_()
        x = torch.randn(2, 23, 3, dtype=torch.float64)
        want, _ = cell(x)
        _, z, n = (x @ cell.weight_ih_l0.T + cell.bias_ih_l0).chunk(3, -1)
        z, n = z.sigmoid(), n.tanh()
        torch.testing.assert_close(linear_scan_chunked((1 - z) * n, a=z)[0], want, rtol=1e-12, atol=1e-12)
        got, _ = linear_scan_chunked((1 - z) * n, z.log())
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("t", [1, 6])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradcheck(form, t: int, packed: bool) -> None:
    x = inputs(2, 2, t, 2, pair=form[0], log=form[1], timeless=form[2])
    ids = torch.tensor([[0, 1, 0, 1, 2, 2], [4, 4, 0, 6, 6, 0]])[:, :t]
    segments = Segments.from_ids(ids, continues=True) if packed else None
    n = len(x.u)

    def run(*leaves: Tensor):
        return call(linear_scan_chunked, Inputs(leaves[:n], leaves[n : 2 * n], leaves[2 * n :], x.log), segments=segments)

    assert torch.autograd.gradcheck(run, x.leaves)


def test_second_derivatives_of_the_reference() -> None:
    x = inputs(2, 1, 4, 2, pair=True)

    def run(*leaves: Tensor):
        return call(linear_scan_reference, Inputs(leaves[:2], leaves[2:4], leaves[4:], True))

    assert torch.autograd.gradgradcheck(run, x.leaves)


def test_eigenvalues_of_either_sign_and_zero_have_exact_gradients() -> None:
    a = torch.tensor([-1.0, -0.5, 0.0, 1.0], dtype=torch.float64)
    for timeless in (True, False):
        x = inputs(3, 2, 20, 4, log=False)
        x = x._replace(decay=((a if timeless else a.expand(2, 20, 4).clone()).requires_grad_(),))
        assert_same(x, call(linear_scan_chunked, x), call(linear_scan_reference, x))


@pytest.mark.parametrize("op", [linear_scan_reference, linear_scan_chunked])
@pytest.mark.parametrize("pair", [False, True])
def test_no_tokens_and_no_rows(op, pair: bool) -> None:
    x = inputs(0, 2, 0, pair=pair)
    out = call(op, x)
    n = len(x.u)
    assert all(h.shape == (2, 0, 3) for h in out[:n])
    for last, state in zip(out[n:], x.state, strict=True):
        assert torch.equal(last, state)
        assert torch.equal(torch.autograd.grad(last.sum(), state, retain_graph=True)[0], torch.ones_like(state))
    assert all(not last.any() for last in call(op, x, given=False)[n:])
    for t in (0, 1, 40):
        out = call(op, inputs(0, 0, t, 2, 5, pair=pair))
        assert [y.shape for y in out] == [(0, t, 2, 5)] * n + [(0, 2, 5)] * n


def test_some_inputs_without_gradient_and_unused_results() -> None:
    x = inputs(2, 2, 20)
    for choose in (lambda h, last: h.square().sum(), lambda h, last: last.square().sum()):
        found = []
        for op in (linear_scan_chunked, linear_scan_reference):
            h, last = op(x.u[0], x.decay[0].detach(), initial_state=x.state[0])
            found.append(torch.autograd.grad(choose(h, last), (x.u[0], x.state[0])))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert not linear_scan_chunked(x.u[0].detach(), x.decay[0].detach())[0].requires_grad


def test_strided_inputs() -> None:
    x = inputs(4, 2, 33, 4, 5, pair=True)
    strided = x.map(lambda y: y.detach().mT.contiguous().mT.requires_grad_())
    assert not strided.u[0].is_contiguous()
    assert_same(strided, call(linear_scan_chunked, strided), call(linear_scan_reference, strided))
    wide = torch.randn(2, 33, 8, dtype=torch.float64)
    results = [op(wide[..., :4], -wide[..., 4:].abs()) for op in (linear_scan_chunked, linear_scan_reference)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", [linear_scan_reference, linear_scan_chunked])
@pytest.mark.parametrize("t", [1, 5])
def test_what_does_not_fit_is_refused(op, t: int) -> None:
    u = torch.randn(2, t, 3)
    log_a = -torch.rand(2, t, 3)
    with pytest.raises(ConfigError, match="give log_a or a, one of them; got neither"):
        op(u)
    with pytest.raises(ConfigError, match="got both"):
        op(u, log_a, a=log_a)
    with pytest.raises(ConfigError, match=r"u must be \(b t ...channels\); got \(2, 3\)"):
        op(u[:, 0], log_a)
    with pytest.raises(ConfigError, match=r"a must be \(2, \d, 3\), or \(3,\) for all rows and times; got \(1, \d, 3\)"):
        op(u, a=log_a[:1])
    with pytest.raises(ConfigError, match=r"both be tensors or both be \(re, im\) pairs"):
        op((u, u), log_a)
    with pytest.raises(ConfigError, match=r"initial_state must be \(b ...channels\) = \(2, 3\); got \[\(3, 2\)\]"):
        op(u, log_a, initial_state=torch.zeros(3, 2))
    with pytest.raises(ConfigError, match=r"initial_state must be a pair of"):
        op((u, u), (log_a, log_a), initial_state=torch.zeros(2, 3))
    with pytest.raises(ConfigError, match="both parts of u must have one shape"):
        op((u, u[:1]), (log_a, log_a))
    with pytest.raises(ConfigError, match=r"complex ones come as a \(re, im\) pair"):
        op(u.to(torch.complex64), log_a)
    with pytest.raises(ConfigError, match="u must be a tensor or"):
        op((u, u, u), log_a)
    with pytest.raises(ConfigError, match="segments must be"):
        op(u, log_a, segments=Segments.from_lengths([[3], [3]], width=t + 3))


@pytest.mark.parametrize("t", [1, 40])
@pytest.mark.parametrize(
    ("dtype", "of_state"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
     (torch.float64, torch.float64)],
)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_dtypes(form, t: int, dtype: torch.dtype, of_state: torch.dtype) -> None:
    x = inputs(0, 2, t, pair=form[0], log=form[1], timeless=form[2], dtype=dtype)
    for op in (linear_scan_reference, linear_scan_chunked):
        out = call(op, x)
        assert {y.dtype for y in out} == {of_state}
        found = torch.autograd.grad(sum(y.sum() for y in out), x.leaves)
        assert [g.dtype for g in found] == [dtype] * len(found)
        mixed = call(op, x._replace(u=tuple(y.double() for y in x.u)))
        assert {y.dtype for y in mixed} == {torch.float64}
    wide = x.map(lambda y: y.detach().double().requires_grad_())
    tol = 1e-10 if dtype == torch.float64 else 2e-5 if dtype == torch.float32 else 5e-2
    found, exact = (
        torch.autograd.grad(sum(y.sum() for y in call(op, z)), z.leaves)
        for op, z in ((linear_scan_chunked, x), (linear_scan_reference, wide))
    )
    for a, b in zip(found, exact, strict=True):
        assert float((a.double() - b).norm()) <= tol * float(b.norm() + 1e-3)


def test_kernels_are_registered_and_take_pairs() -> None:
    kernels = KernelSet(KERNELS)
    assert [k.name for k in kernels.of("linear_scan")] == ["chunked", "reference"]
    op = kernels.bind("linear_scan", device=torch.device("cpu"), dtype=torch.float32)
    for pair in (False, True):
        x = inputs(0, 2, 20, pair=pair, dtype=torch.float32)
        h, _ = op(number(x.u), number(x.decay), n_tokens=20)
        want, _ = linear_scan_chunked(number(x.u), number(x.decay))
        assert all(torch.equal(a, b) for a, b in zip(h, want, strict=True))
    assert kernels.get("linear_scan", "reference").load() is linear_scan_reference


@pytest.mark.parametrize("budget", [1, 100, 2**12])
@pytest.mark.parametrize("tokens", [1, 6, 100])
def test_spans_cover_every_token_once(tokens: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridtf.ops.linear_scan.spans.SPAN_TOKENS", tokens)
    monkeypatch.setattr("hybridtf.ops.spans.SPAN_BUDGET", budget)
    for t in range(60):
        for b in (0, 1, 3):
            spans = spans_for(torch.Size((b, t, 5)), torch.device("cpu"))
            assert [i for s in spans for i in range(s.start, s.stop)] == list(range(t))
