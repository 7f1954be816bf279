"""``ssd``: every form against the reference, and the reference against code written another way."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hybridtf.core.errors import ConfigError
from hybridtf.core.kernels import KernelSet
from hybridtf.core.segments import Segments
from hybridtf.ops.ssd import KERNELS, ssd_chunked, ssd_reference
from tests.ops.recurrence_cases import assert_same, call
from tests.ops.ssd_cases import Inputs, inputs, random_segments

LENGTHS = (0, 1, 2, 15, 16, 17, 31, 63, 64, 65, 100, 127)


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64])
@pytest.mark.parametrize("t", LENGTHS)
def test_chunked_equals_reference(t: int, chunk_size: int) -> None:
    x = inputs(t, 2, t, g=2, h=4)
    assert_same(x, call(ssd_chunked, x, chunk_size=chunk_size), call(ssd_reference, x))


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64])
@pytest.mark.parametrize("t", LENGTHS)
def test_chunked_equals_reference_with_segments(t: int, chunk_size: int) -> None:
    x = inputs(t, 6, t, g=1, h=2)
    segments = random_segments(100 * t + chunk_size, 6, t)
    found = call(ssd_chunked, x, segments=segments, chunk_size=chunk_size)
    assert_same(x, found, call(ssd_reference, x, segments=segments))


@pytest.mark.parametrize(("g", "h", "n", "p"), [(1, 1, 1, 1), (1, 6, 4, 6), (2, 6, 7, 2), (6, 6, 10, 5), (3, 3, 6, 13)])
def test_groups_and_odd_widths(g: int, h: int, n: int, p: int) -> None:
    x = inputs(g + h, 2, 37, g, h, n, p)
    assert_same(x, call(ssd_chunked, x, chunk_size=16), call(ssd_reference, x))
    one = Inputs(*(y[:, :1].detach().requires_grad_() for y in x[:4]), x.initial_state)
    assert_same(one, call(ssd_chunked, one), call(ssd_reference, one))


@pytest.mark.parametrize("budget", [1, 2**9, 2**12])
def test_spans_of_any_number_of_chunks(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridtf.ops.spans.SPAN_BUDGET", budget)
    x = inputs(3, 3, 75, h=2)
    segments = random_segments(9, 3, 75)
    assert_same(x, call(ssd_chunked, x, segments=segments, chunk_size=8), call(ssd_reference, x, segments=segments))


def dense(x: Inputs) -> Tensor:
    """The t x t matrix of the recurrence, from products of decays one by one: nothing shared with the package."""
    q, k, v, log_a, state = x
    b, t, h, _ = v.shape
    r = h // q.shape[2]
    a = log_a.exp()
    decay = torch.zeros(b, t, t + 1, h, dtype=v.dtype)
    for i in range(t):
        for j in range(i + 2):
            decay[:, i, j] = torch.prod(a[:, j : i + 1], 1)
    q, k = (z.repeat_interleave(r, 2) for z in (q, k))
    y = torch.einsum("bihn,bjhn,bijh,bjhp->bihp", q, k, decay[:, :, 1:], v)
    return y + torch.einsum("bihn,bhnp,bih->bihp", q, state, decay[:, :, 0])


def test_reference_equals_the_dense_matrix() -> None:
    x = inputs(5, 2, 13, g=2, h=4, n=6, p=4)
    torch.testing.assert_close(call(ssd_reference, x)[0], dense(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(call(ssd_chunked, x, chunk_size=5)[0], dense(x), rtol=1e-12, atol=1e-12)


def test_equals_the_scan_of_transformers() -> None:
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    scan = getattr(mamba2.mamba2_chunk_scan, "__wrapped__", mamba2.mamba2_chunk_scan)
    x = Inputs(*(y.detach() for y in inputs(8, 2, 50, g=2, h=4, n=6, p=4, dtype=torch.float32)))
    step = torch.rand(2, 50, 4) + 0.1
    rate = -torch.rand(4) - 0.2
    state = x.initial_state
    theirs, their_state = scan(
        x.v, step, rate, x.k, x.q, chunk_size=16, initial_states=state.transpose(2, 3), return_final_states=True
    )
    y, last = ssd_chunked(x.q, x.k, x.v * step[..., None], step * rate, initial_state=state, chunk_size=16)
    torch.testing.assert_close(y, theirs, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(last, their_state.transpose(2, 3), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("with_segments", [False, True])
@pytest.mark.parametrize("t", [1, 6])
def test_gradcheck(t: int, with_segments: bool) -> None:
    x = inputs(2, 2, t, g=1, h=2, n=2, p=3)
    segments = None
    if with_segments:
        segments = Segments.from_ids(torch.tensor([[0, 1, 0, 1, 2, 2], [4, 4, 0, 6, 6, 0]])[:, :t], continues=True)
    for op in (ssd_reference, ssd_chunked):
        f = lambda *a, op=op: op(*a[:4], initial_state=a[4], segments=segments, chunk_size=4)  # noqa: E731
        assert torch.autograd.gradcheck(f, tuple(x))


def test_some_inputs_without_gradient() -> None:
    x = inputs(2, 2, 20)
    y, _ = ssd_chunked(x.q, x.k.detach(), x.v, x.log_a.detach(), chunk_size=8)
    expected, _ = ssd_reference(x.q, x.k, x.v, x.log_a)
    for a, b in zip(
        torch.autograd.grad(y.sum(), (x.q, x.v)), torch.autograd.grad(expected.sum(), (x.q, x.v)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", [ssd_reference, ssd_chunked])
@pytest.mark.parametrize("t", [0, 1, 5, 70])
def test_empty_batch_and_final_state_without_tokens(op, t: int) -> None:
    x = inputs(0, 0, t)
    y, state = call(op, x)
    assert y.shape == (0, t, 2, 3)
    assert state.shape == (0, 2, 5, 3)
    x = inputs(0, 2, 0)
    y, state = call(op, x)
    assert y.shape == (2, 0, 2, 3)
    torch.testing.assert_close(state, x.initial_state, rtol=0, atol=0)
    assert torch.equal(torch.autograd.grad(state.sum(), x.initial_state)[0], torch.ones_like(state))
    assert torch.equal(op(*x[:4])[1], torch.zeros(2, 2, 5, 3, dtype=torch.float64))


def test_non_contiguous_inputs() -> None:
    x = inputs(4, 2, 33, g=2, h=4, n=4, p=6)
    strided = Inputs(*(y.detach().transpose(1, -1).contiguous().transpose(1, -1).requires_grad_() for y in x))
    assert not strided.v.is_contiguous()
    assert_same(strided, call(ssd_chunked, strided, chunk_size=16), call(ssd_reference, strided))
    wide = torch.randn(2, 33, 20, dtype=torch.float64)
    q, k, v = wide[..., None, :4], wide[..., None, 4:8], wide[..., 8:].unflatten(2, (2, 6))
    log_a = -torch.rand(2, 2, 33, dtype=torch.float64).transpose(1, 2)
    for a, b in zip(ssd_chunked(q, k, v, log_a, chunk_size=8), ssd_reference(q, k, v, log_a), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", [ssd_reference, ssd_chunked])
@pytest.mark.parametrize("t", [1, 5, 17])
def test_wrong_shapes_are_refused(op, t: int) -> None:
    x = inputs(0, 2, t, g=2, h=4, n=4, p=6)
    with pytest.raises(ConfigError, match=r"initial_state must be \(b h n p\) = \(2, 4, 4, 6\); got \(2, 4, 6, 4\)"):
        op(*x[:4], initial_state=x.initial_state.transpose(2, 3))
    with pytest.raises(ConfigError, match="multiple of the 2 groups"):
        op(x.q, x.k, x.v[:, :, :3], x.log_a[:, :, :3])
    with pytest.raises(ConfigError, match="q must have the shape of k"):
        op(x.q[..., :2], *x[1:4])
    with pytest.raises(ConfigError, match="log_a must be"):
        op(*x[:3], x.log_a[..., :1])
    with pytest.raises(ConfigError, match="k must be"):
        op(x.q[:1], x.k[:1], *x[2:4])
    with pytest.raises(ConfigError, match="segments must be"):
        op(*x[:4], segments=Segments.from_lengths([[3]], width=t + 3))
    with pytest.raises(ConfigError, match="chunk_size must be 1 or more"):
        op(*x[:4], chunk_size=0)


@pytest.mark.parametrize("t", [1, 40])
@pytest.mark.parametrize(
    ("dtype", "of_state"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_dtypes_of_results(t: int, dtype: torch.dtype, of_state: torch.dtype) -> None:
    for op in (ssd_reference, ssd_chunked):
        y, state = op(*inputs(0, 2, t, dtype=dtype)[:4])
        assert (y.dtype, state.dtype) == (dtype, of_state)
        mixed = inputs(0, 2, t, dtype=dtype)
        y, state = op(*mixed[:3], mixed.log_a.float(), initial_state=mixed.initial_state.float())
        assert (y.dtype, state.dtype) == (dtype, of_state)
        assert all(g.dtype == dtype for g in torch.autograd.grad(y.float().sum(), mixed[:3]))


def test_kernels_are_registered() -> None:
    kernels = KernelSet(KERNELS)
    assert [k.name for k in kernels.of("ssd")] == ["chunked", "reference"]
    op = kernels.bind("ssd", device=torch.device("cpu"), dtype=torch.float32)
    x = inputs(0, 2, 20, dtype=torch.float32)
    assert torch.equal(op(*x[:4], n_tokens=20, chunk_size=8)[0], ssd_chunked(*x[:4], chunk_size=8)[0])
    assert kernels.get("ssd", "reference").load() is ssd_reference


def test_lengths_cover_every_side_of_a_chunk() -> None:
    for size in (16, 64):
        assert {size - 1, size, size + 1} <= set(LENGTHS)
    kinds = [random_segments(s, 6, 40) for s in range(8)]
    rows = list(itertools.chain.from_iterable(s.real.tolist() for s in kinds))
    assert any(all(r) for r in rows)
    assert any(not any(r) for r in rows)
    assert any(r[0] and r[-1] and not all(r) for r in rows)
