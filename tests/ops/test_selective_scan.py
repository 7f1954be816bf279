"""``selective_scan``: every form against the reference, and the reference against code written another way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.kernels import KernelSet
from hybridtf.core.segments import Segments
from hybridtf.ops.selective_scan import KERNELS, selective_scan_chunked, selective_scan_reference
from hybridtf.ops.selective_scan.tree import products, scan_, scan_back_
from tests.ops.recurrence_cases import assert_same, call, grads
from tests.ops.selective_scan_cases import Inputs, inputs
from tests.ops.ssd_cases import random_segments

LENGTHS = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 61)


def naive(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence channel by channel and state by state, on numbers: nothing shared with the package."""
    (b, t, c), n = x.shape, A.shape[1]
    B, C = (z if z.ndim == 4 else z[:, :, None] for z in (B, C))
    width = c // B.shape[2]
    y, last = [], []
    for row in range(b):
        for j in range(c):
            h = [state[row, j, k] for k in range(n)]
            for i in range(t):
                step = dt[row, i, j]
                h = [torch.exp(step * A[j, k]) * h[k] + step * B[row, i, j // width, k] * x[row, i, j] for k in range(n)]
                read = sum(C[row, i, j // width, k] * h[k] for k in range(n))
                y.append(read + D[j] * x[row, i, j])
            last.extend(h)
    return torch.stack(y).view(b, c, t).transpose(1, 2), torch.stack(last).view(b, c, n)


@pytest.mark.parametrize("g", [None, 1, 2, 4])
@pytest.mark.parametrize("op", [selective_scan_reference, selective_scan_chunked])
def test_equals_the_recurrence_on_numbers(op, g: int | None) -> None:
    x = inputs(1, 2, 7, c=4, n=2, g=g)
    assert_same(x, call(op, x, chunk_size=4), naive(*x), tol=1e-12)


@pytest.mark.parametrize("chunk_size", [1, 2, 7, 16, 64])
@pytest.mark.parametrize("t", LENGTHS)
def test_chunked_equals_reference(t: int, chunk_size: int) -> None:
    x = inputs(t, 2, t)
    assert_same(x, call(selective_scan_chunked, x, chunk_size=chunk_size), call(selective_scan_reference, x))


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64])
@pytest.mark.parametrize("t", LENGTHS)
def test_chunked_equals_reference_with_segments(t: int, chunk_size: int) -> None:
    x, segments = inputs(t, 6, t, g=2), random_segments(100 * t + chunk_size, 6, t)
    found = call(selective_scan_chunked, x, segments=segments, chunk_size=chunk_size)
    assert_same(x, found, call(selective_scan_reference, x, segments=segments))


@pytest.mark.parametrize(("c", "n", "g"), [(1, 1, None), (6, 1, 3), (1, 17, 1), (12, 4, 4), (5, 3, 5), (13, 2, None)])
def test_odd_widths_and_groups(c: int, n: int, g: int | None) -> None:
    x = inputs(c + n, 3, 29, c, n, g)
    assert_same(x, call(selective_scan_chunked, x, chunk_size=8), call(selective_scan_reference, x))
    one = Inputs(*(z.detach().requires_grad_() for z in x.part(slice(None), slice(1))), x.initial_state)
    assert_same(one, call(selective_scan_chunked, one), call(selective_scan_reference, one))


@pytest.mark.parametrize("budget", [1, 40, 2**8, 2**10])
@pytest.mark.parametrize("g", [None, 2])
def test_blocks_of_any_size(budget: int, g: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridtf.ops.spans.SPAN_BUDGET", budget)
    x, segments = inputs(3, 3, 27, c=10, g=g), random_segments(9, 3, 27)
    found = call(selective_scan_chunked, x, segments=segments, chunk_size=8)
    assert_same(x, found, call(selective_scan_reference, x, segments=segments))


@pytest.mark.parametrize("length", range(1, 41))
def test_halving_equals_the_walk_both_ways(length: int) -> None:
    a, w = torch.rand(length, 2, 3, dtype=torch.float64), torch.randn(length, 2, 3, dtype=torch.float64)
    a[0] = float("nan")  # the first factor belongs to a state that is not in w
    ahead, kept = w.clone(), a.clone()
    for i in range(1, length):
        ahead[i] += a[i] * ahead[i - 1]
    found = w.clone()
    scan_(products(a), found)
    torch.testing.assert_close(found, ahead, rtol=1e-13, atol=1e-13)
    assert torch.equal(a.nan_to_num(), kept.nan_to_num())
    a = torch.rand(length, 2, 3, dtype=torch.float64)
    a[-1] = float("nan")
    back, found = w.clone(), w.clone()
    for i in range(length - 2, -1, -1):
        back[i] += a[i] * back[i + 1]
    scan_back_(products(a), found)
    torch.testing.assert_close(found, back, rtol=1e-13, atol=1e-13)


@pytest.mark.filterwarnings("ignore")  # transformers warns about kernels it does not find
@pytest.mark.parametrize("t", [1, 23])
def test_equals_the_scan_of_transformers(t: int) -> None:
    modeling = pytest.importorskip("transformers.models.jamba.modeling_jamba")
    scan = getattr(modeling.mamba_selective_scan, "__wrapped__", modeling.mamba_selective_scan)
    x = inputs(8, 2, t, c=6, n=5, dtype=torch.float32)
    rows = [z.transpose(1, 2) if i in x.in_time else z for i, z in enumerate(x[:5])]
    theirs, state = scan(*rows, D=x.D, return_last_state=True)
    assert_same(x, selective_scan_chunked(*x[:6], chunk_size=8), (theirs.transpose(1, 2), state), tol=2e-5)


@pytest.mark.parametrize("with_segments", [False, True])
@pytest.mark.parametrize("t", [1, 6])
def test_gradcheck(t: int, with_segments: bool) -> None:
    x = inputs(2, 2, t, c=2, n=2)
    segments = None
    if with_segments:
        segments = Segments.from_ids(torch.tensor([[0, 1, 0, 1, 2, 2], [4, 4, 0, 6, 6, 0]])[:, :t], continues=True)
    for op in (selective_scan_reference, selective_scan_chunked):
        f = lambda *a, op=op: op(*a[:6], initial_state=a[6], segments=segments, chunk_size=4)  # noqa: E731
        assert torch.autograd.gradcheck(f, tuple(x))


@pytest.mark.parametrize("t", [1, 20])
def test_some_inputs_without_gradient_and_no_skip(t: int) -> None:
    x = inputs(2, 2, t)
    y, _ = selective_scan_chunked(x.x, x.dt.detach(), x.A, x.B.detach(), x.C, chunk_size=8)
    expected, _ = selective_scan_reference(x.x, x.dt, x.A, x.B, x.C)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    of = (x.x, x.A, x.C)
    for a, b in zip(torch.autograd.grad(y.sum(), of), torch.autograd.grad(expected.sum(), of), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", [selective_scan_reference, selective_scan_chunked])
@pytest.mark.parametrize("t", [0, 1, 5, 70])
def test_empty_batch_and_final_state_without_tokens(op, t: int) -> None:
    x = inputs(0, 0, t)
    y, state = call(op, x)
    assert (y.shape, state.shape) == ((0, t, 4), (0, 4, 3))
    assert all(not g.any() for g in grads(y, state, x))
    x = inputs(0, 2, 0)
    y, state = call(op, x)
    assert y.shape == (2, 0, 4)
    assert torch.equal(state, x.initial_state)
    assert torch.equal(torch.autograd.grad(state.sum(), x.initial_state)[0], torch.ones_like(state))
    assert torch.equal(op(*x[:6])[1], torch.zeros(2, 4, 3, dtype=torch.float64))


def test_non_contiguous_inputs() -> None:
    x = inputs(4, 2, 33, c=6, g=2)
    strided = Inputs(*(z.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_() for z in x))
    assert not strided.x.is_contiguous()
    assert_same(strided, call(selective_scan_chunked, strided, chunk_size=16), call(selective_scan_reference, strided))
    wide = torch.randn(2, 33, 20, dtype=torch.float64)
    split = (wide[..., :6], -wide[..., 6:12], x.A.detach(), wide[..., 12:15], wide[..., 15:18])
    found, expected = selective_scan_chunked(*split, chunk_size=8), selective_scan_reference(*split)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_inputs_are_left_alone_and_results_are_contiguous() -> None:
    x = inputs(4, 1, 13, c=6)
    before = [z.detach().clone() for z in x]
    y, state = call(selective_scan_chunked, x, chunk_size=4)
    dy, dstate = torch.randn_like(y), torch.randn_like(state)
    kept = dy.clone(), dstate.clone()
    torch.autograd.grad((y, state), x, (dy, dstate))
    for a, b in zip([*x, dy, dstate], [*before, *kept], strict=True):
        assert torch.equal(a, b)
    assert y.is_contiguous()
    assert state.is_contiguous()


@pytest.mark.parametrize("op", [selective_scan_reference, selective_scan_chunked])
@pytest.mark.parametrize("t", [1, 5, 17])
def test_wrong_shapes_are_refused(op, t: int) -> None:
    x = inputs(0, 2, t)
    with pytest.raises(ConfigError, match=r"initial_state must be \(b c n\) = \(2, 4, 3\); got \(2, 3, 4\)"):
        op(*x[:6], initial_state=x.initial_state.transpose(1, 2))
    with pytest.raises(ConfigError, match="x and dt must be"):
        op(x.x, x.dt[..., :1], *x[2:6])
    with pytest.raises(ConfigError, match="A must be"):
        op(*x[:2], x.A.T, *x[3:6])
    with pytest.raises(ConfigError, match=r"B must be \(b t n\) = "):
        op(*x[:3], x.B[..., :1], *x[4:6])
    with pytest.raises(ConfigError, match="C must have the shape of B"):
        op(*x[:4], x.C[..., :1], x.D)
    wide = x.B[:, :, None].expand(2, t, 3, 3)
    with pytest.raises(ConfigError, match="multiple of the 3 groups"):
        op(*x[:3], wide, wide, x.D)
    with pytest.raises(ConfigError, match="D must be"):
        op(*x[:5], x.D[:1])
    with pytest.raises(ConfigError, match="segments must be"):
        op(*x[:6], segments=Segments.from_lengths([[3]], width=t + 3))
    with pytest.raises(ConfigError, match="chunk_size must be 1 or more"):
        op(*x[:6], chunk_size=0)


@pytest.mark.parametrize("t", [1, 40])
@pytest.mark.parametrize(
    ("dtype", "of_state"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_dtypes_of_results(t: int, dtype: torch.dtype, of_state: torch.dtype) -> None:
    for op in (selective_scan_reference, selective_scan_chunked):
        x = inputs(0, 2, t, dtype=dtype)
        y, state = op(*x[:6])
        assert (y.dtype, state.dtype) == (dtype, of_state)
        y, state = op(x.x, x.dt.float(), x.A.float(), *x[3:6], initial_state=x.initial_state.float())
        assert (y.dtype, state.dtype) == (dtype, of_state)
        assert all(g.dtype == dtype for g in torch.autograd.grad(y.float().sum(), x[:6]))


def test_kernels_are_registered() -> None:
    kernels = KernelSet(KERNELS)
    assert [k.name for k in kernels.of("selective_scan")] == ["chunked", "reference"]
    op = kernels.bind("selective_scan", device=torch.device("cpu"), dtype=torch.float32)
    x = inputs(0, 2, 20, dtype=torch.float32)
    assert torch.equal(op(*x[:6], n_tokens=20, chunk_size=8)[0], selective_scan_chunked(*x[:6], chunk_size=8)[0])
    assert kernels.get("selective_scan", "reference").load() is selective_scan_reference
