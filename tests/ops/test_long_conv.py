from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.core import ConfigError, KernelError, Segments
from hybridtf.ops.long_conv import chunked, long_conv_chunked, long_conv_reference
from tests.ops.operators import arguments, check_operators
from tests.ops.ssd_cases import random_segments

F64, C = torch.float64, 3
OPS = [long_conv_reference, long_conv_chunked]


def draw(t: int, w: int, b: int = 2, s: int = 0, dtype=F64) -> list[Tensor]:
    gen = torch.Generator().manual_seed(t + w + s)
    shapes = ((b, t, C), (C, w), (b, s, C))
    return [torch.randn(shape, generator=gen, dtype=F64).to(dtype).requires_grad_() for shape in shapes]


def by_torch(x, weight):
    """torch.nn.functional.conv1d with every tap of the filter."""
    return F.conv1d(F.pad(x.mT, (weight.shape[1] - 1, 0)), weight.flip(1)[:, None], groups=C).mT


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("t", "w"), [(1, 5), (31, 40), (33, 33), (100, 7), (100, 1), (130, 130), (70, 300)])
def test_forward_and_gradients_equal_torch(op, t, w):
    x, weight, _ = draw(t, w)
    got, want = op(x, weight), by_torch(x, weight)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    dy = torch.randn_like(want)
    ours, theirs = (torch.autograd.grad((y * dy).sum(), (x, weight)) for y in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("t", [1, 2, 40])
def test_a_past_is_what_came_before(op, t):
    """Rows with pasts of different length, one of none, in a buffer whose rest is NaN."""
    s, w = 45, 60
    x, weight, past = draw(t, w, b=4, s=s)
    length = torch.tensor([0, 3, 44, 45])
    rubbish = torch.where(torch.arange(s)[:, None] < length[:, None, None], past, float("nan"))
    got = op(x, weight, rubbish, length)
    for row, n in enumerate(length.tolist()):
        want = by_torch(torch.cat([past[row, :n], x[row]])[None], weight)[0, n:]
        torch.testing.assert_close(got[row], want, rtol=0, atol=1e-12)
    grads = torch.autograd.grad(got.square().sum(), (x, weight, past))
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("t", "s"), [(1, 9), (60, 0), (60, 37)])
def test_any_documents_after_a_past(seed, t, s):
    x, weight, past = draw(t, 80, b=4, s=s)
    segments, length = random_segments(seed, 4, t), torch.tensor([0, 1, s, s]).clamp(max=s)
    given = (x, weight, past, length) if s else (x, weight)
    got, want = (op(*given, segments=segments) for op in (long_conv_chunked, long_conv_reference))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    inputs = (x, weight, past) if s else (x, weight)
    losses = (y.square().sum() for y in (got, want))
    ours, theirs = (torch.autograd.grad(z, inputs, allow_unused=True, materialize_grads=True) for z in losses)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_a_later_token_changes_nothing_not_even_by_rounding():
    x, weight, _ = draw(200, 200, dtype=torch.float32)
    with torch.no_grad():
        before = long_conv_chunked(x, weight)
        for at in (1, 32, 77, 128, 199):
            spoilt = x.clone()
            spoilt[:, at:] = 1e6 * torch.randn_like(spoilt[:, at:])
            assert torch.equal(long_conv_chunked(spoilt, weight)[:, :at], before[:, :at])


def test_gradcheck():
    x, weight, past = draw(5, 9, s=4)
    segments, length = Segments.from_ids(torch.tensor([[1, 1, 0, 1, 2], [0, 1, 1, 1, 1]])), torch.tensor([4, 2])

    def run(x, weight, past):
        return long_conv_chunked(x, weight, past, length, segments=segments)

    assert torch.autograd.gradcheck(run, (x, weight, past))


@pytest.mark.parametrize("packed", [False, True])
def test_the_operators_are_well_formed(packed):
    x, weight, _ = (z.detach() for z in draw(40, 50))
    s = random_segments(1, 2, 40)
    check_operators(chunked._OP, arguments((x, weight), s if packed else None, ()), [x.new_zeros(2, 0)])


def test_compiled():
    x, weight, past = draw(40, 50, s=7)
    segments, length = random_segments(2, 2, 40), torch.tensor([7, 3])
    compiled = torch.compile(long_conv_chunked, backend="aot_eager", fullgraph=True)
    got, want = (op(x, weight, past, length, segments=segments) for op in (compiled, long_conv_chunked))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    ours, theirs = (torch.autograd.grad(y.square().sum(), (x, weight, past)) for y in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_second_derivatives_are_refused():
    x, weight, _ = draw(9, 9)
    (first,) = torch.autograd.grad(long_conv_chunked(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(KernelError, match="long_conv: kernel 'chunked' has no second derivatives"):
        torch.autograd.grad(first.sum(), x)


def test_float32_over_a_long_input():
    x, weight, _ = (z.detach() for z in draw(20_000, 20_000, b=1))
    got = long_conv_chunked(x.float(), weight.float())
    n = 2 * 20_000
    want = torch.fft.irfft(torch.fft.rfft(x.mT, n=n) * torch.fft.rfft(weight, n=n), n=n)[..., :20_000].mT
    assert float((got - want).abs().max() / want.abs().max()) < 3e-6


def test_memory_between_forward_and_backward_is_the_inputs():
    x, weight, saved = torch.randn(1, 4096, 4, requires_grad=True), torch.randn(4, 4096, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda z: (saved.append(z), z)[1], lambda z: z):
        long_conv_chunked(x, weight)
    size = sum({z.untyped_storage().data_ptr(): z.untyped_storage().nbytes() for z in saved}.values())
    assert size <= 3 * x.nbytes


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 3)}, r"x must be \(b t c\)"),
        ({"weight": torch.zeros(2, 3)}, r"weight must be \(c w\) with c = 3"),
        ({"weight": torch.zeros(3, 0)}, "w > 0"), ({"past": torch.zeros(2, 4, 3)}, "given together"),
        ({"past": torch.zeros(1, 4, 3), "past_length": torch.zeros(1)}, r"past must be \(b s c\)"),
        ({"past": torch.zeros(2, 4, 3), "past_length": torch.zeros(1)}, r"past_length must be \(b\)"),
        ({"segments": Segments.from_ids(torch.ones(2, 4, dtype=torch.int64))}, r"segments must be \(b t\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(op, change, message):
    with pytest.raises(ConfigError, match=message):
        op(**{"x": torch.zeros(2, 5, 3), "weight": torch.zeros(3, 5), **change})
