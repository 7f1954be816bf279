"""``grouped_linear``: every form against a plain product per row, gradients of the first and second order, edges."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter
from torch.utils.flop_counter import FlopCounterMode

from hybridtf.core import ConfigError, KernelRequest
from hybridtf.ops.grouped_linear import (
    KERNELS,
    grouped_linear_blocks,
    grouped_linear_grouped,
    grouped_linear_reference,
)
from hybridtf.ops.grouped_linear.blocks import block_size, make_blocks
from hybridtf.ops.grouped_linear.grouped import why_not_grouped

LOADS = {
    "even": [3, 3, 3, 3], "uneven": [1, 0, 9, 2], "first empty": [0, 0, 5, 1], "last empty": [4, 3, 0, 0],
    "one has all": [0, 13, 0, 0], "one row": [0, 0, 1, 0], "none": [0, 0, 0, 0], "one group": [7],
}


def case(loads, tail=0, d_in=8, d_out=4, dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(3)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    ends = torch.tensor(loads).cumsum(0)
    e = len(loads)
    return randn(sum(loads) + tail, d_in), randn(e, d_in, d_out), ends, randn(e, d_out) if bias else None


def naive(x, weight, ends, bias):
    """Row by row."""
    rows = []
    for r in range(x.shape[0]):
        group = next((g for g, end in enumerate(ends.tolist()) if r < end), None)
        if group is None:
            rows.append(torch.zeros_like(weight[0, 0]))
        else:
            rows.append((x[r][:, None] * weight[group]).sum(0) + (0 if bias is None else bias[group]))
    return torch.stack(rows) if rows else x.new_zeros(0, weight.shape[2])


def results(fn, x, weight, ends, bias):
    y = fn(x, weight, ends, bias)
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y)
    inputs = [t for t in (x, weight, bias) if t is not None]
    grads = torch.autograd.grad((y * probe).sum() + 0 * inputs[0].sum(), inputs, allow_unused=True)
    return [y.detach(), *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, inputs, strict=True))]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("loads", LOADS.values(), ids=LOADS.keys())
def test_forms_agree_with_a_loop_over_rows(loads, tail, bias):
    args = case(loads, tail, bias=bias)
    want = results(naive, *args)
    for fn in (grouped_linear_reference, grouped_linear_blocks):
        for got, expected in zip(results(fn, *args), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    narrow = case(loads, tail, bias=bias, dtype=torch.float32)
    for got, expected in zip(results(grouped_linear_grouped, *narrow), want, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fn", [grouped_linear_grouped, grouped_linear_blocks])
def test_low_precision(fn, dtype):
    args = case([5, 0, 17, 2], 2, d_in=16, d_out=8, dtype=dtype)
    wide = [None if t is None else t.double() if t.is_floating_point() else t for t in args]
    wide = [t.detach().requires_grad_() if t is not None and t.is_floating_point() else t for t in wide]
    for got, want in zip(results(fn, *args), results(grouped_linear_reference, *wide), strict=True):
        assert got.dtype == dtype
        assert (got.double() - want).norm() <= 2e-2 * want.norm()


@pytest.mark.parametrize("sizes", [(1, 1), (5, 3), (7, 16)])
def test_blocks_take_any_width(sizes):
    args = case([2, 0, 4], 1, *sizes)
    for got, want in zip(results(grouped_linear_blocks, *args), results(naive, *args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_blocks_bound_work_and_memory():
    for n_rows, e in itertools.product((1, 2, 7, 64, 100, 1000), (1, 3, 8, 64)):
        size = block_size(n_rows, e)
        assert size >= n_rows / e
        for loads in ([n_rows] + [0] * (e - 1), torch.bincount(torch.arange(n_rows) % e, minlength=e).tolist()):
            blocks = make_blocks(torch.tensor(loads).cumsum(0), n_rows)
            assert blocks.groups.shape[0] <= min(2 * e, n_rows)
            assert int(blocks.real.sum()) == n_rows
            # Only groups that have rows are read.
            assert set(blocks.groups.tolist()) == {g for g, load in enumerate(loads) if load}


@pytest.mark.parametrize("fn", [grouped_linear_reference, grouped_linear_blocks])
def test_second_derivatives(fn):
    x, weight, ends, bias = case([2, 0, 3], 1, 3, 2)
    assert torch.autograd.gradcheck(lambda *a: fn(a[0], a[1], ends, a[2]), (x, weight, bias))
    assert torch.autograd.gradgradcheck(lambda *a: fn(a[0], a[1], ends, a[2]), (x, weight, bias))


@pytest.mark.parametrize(
    ("fn", "dtype"), [(grouped_linear_blocks, torch.float64), (grouped_linear_grouped, torch.float32)]
)
def test_rows_of_no_group_are_not_read(fn, dtype):
    x, weight, ends, bias = case([2, 0, 3, 1], 4, dtype=dtype)
    dirty = x.detach().clone()
    dirty[6:] = float("nan")
    dirty.requires_grad_()
    for got, want in zip(results(fn, dirty, weight, ends, bias), results(fn, x, weight, ends, bias), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert not fn(dirty, weight, ends, bias)[6:].any()


def test_a_group_without_rows_is_not_read():
    for fn, dtype in ((grouped_linear_blocks, torch.float64), (grouped_linear_grouped, torch.float32)):
        x, weight, ends, bias = case([2, 0, 1], dtype=dtype)
        dirty = weight.detach().clone()
        dirty[1] = float("nan")
        torch.testing.assert_close(fn(x, dirty, ends, bias), fn(x, weight, ends, bias), rtol=0, atol=0)


def test_weights_in_another_dtype_are_cast():
    x, weight, ends, bias = case([1, 0, 0, 0, 1, 0, 0, 0], d_in=16, d_out=8, dtype=torch.float32)
    low = x.detach().bfloat16()
    want = grouped_linear_reference(low, weight, ends, bias)
    for fn in (grouped_linear_grouped, grouped_linear_blocks):
        y = fn(low, weight, ends, bias)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y, want, rtol=1e-2, atol=1e-2)
        y.sum().backward(retain_graph=True)
        assert weight.grad.dtype == torch.float32


def test_flops_are_those_of_the_rows():
    for fn, dtype in ((grouped_linear_blocks, torch.float64), (grouped_linear_grouped, torch.float32)):
        x, weight, ends, _ = case([5, 0, 9, 2], 0, 8, 4, dtype=dtype, bias=False)
        with FlopCounterMode(display=False) as forward:
            y = fn(x, weight, ends)
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
        one = 2 * x.shape[0] * 8 * 4
        assert (forward.get_total_flops(), backward.get_total_flops()) == (one, 2 * one)


def test_compile_has_one_graph_for_all_loads():
    for fn, dtype in ((grouped_linear_blocks, torch.float64), (grouped_linear_grouped, torch.float32)):
        counter = CompileCounter()
        compiled = torch.compile(fn, backend=counter, fullgraph=True)
        for loads in ([5, 0, 9, 2], [0, 0, 0, 16], [4, 4, 4, 4]):
            args = case(loads, dtype=dtype)
            for got, want in zip(results(compiled, *args), results(fn, *args), strict=True):
                torch.testing.assert_close(got, want)
        assert counter.frame_count == 1
        torch._dynamo.reset()


def test_why_not_grouped():
    def ask(dtype, device="cpu", **sizes):
        return why_not_grouped(KernelRequest("grouped_linear", "train", dtype, torch.device(device), sizes))

    assert ask(torch.float32, d_model=16, d_ff=12) is None
    assert "d_ff = 12 is no multiple of 8" in ask(torch.bfloat16, d_model=16, d_ff=12)
    assert "float64" in ask(torch.float64, d_model=16)
    assert "mps" in ask(torch.float32, "mps")
    assert [kernel.name for kernel in KERNELS] == ["reference", "blocks", "grouped"]


@pytest.mark.parametrize("fn", [grouped_linear_reference, grouped_linear_blocks, grouped_linear_grouped])
def test_shapes_that_do_not_fit(fn):
    x, weight, ends, bias = case([1, 2])
    for args, message in (
        ((x[:, :3], weight, ends), r"x must be \(s i\)"), ((x, weight, ends[:1]), "ends must be integers"),
        ((x, weight, ends.double()), "ends must be integers"), ((x, weight, ends, bias[:, :1]), "bias must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            fn(*args)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("loads", LOADS.values(), ids=LOADS)
def test_few_rows_without_gradients(loads, bias):
    x, weight, ends, b = case(loads, tail=2, bias=bias)
    with torch.no_grad():
        for fn in (grouped_linear_grouped, grouped_linear_blocks):
            torch.testing.assert_close(fn(x, weight, ends, b), naive(x, weight, ends, b), atol=1e-12, rtol=0)
            torch.testing.assert_close(fn(x.float(), weight, ends, b), naive(x, weight, ends, b).float(), atol=1e-5, rtol=1e-5)


def test_few_rows_read_no_other_matrix_and_count_their_operations():
    x, weight, ends, _ = case([0, 3, 0, 2], bias=False)
    weight = weight.detach().clone()
    weight[0], weight[2] = torch.nan, torch.nan
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        y = grouped_linear_blocks(x, weight, ends, None)
    assert y.isfinite().all()
    assert counter.get_total_flops() == 2 * 5 * 8 * 4
