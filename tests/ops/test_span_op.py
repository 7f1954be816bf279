"""``span_op`` on a recurrence with a weight, an option and two states: values, gradients, compiler, counter, memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hybridtf.core.errors import KernelError
from hybridtf.core.segments import Segments
from hybridtf.ops.passes_op import Call, States
from hybridtf.ops.span_op import span_op
from tests.ops.operators import arguments, check_operators
from tests.ops.ssd_cases import random_segments


def walk(call: Call, state: States) -> tuple[Tensor, States]:
    """S_t = a S_{t-1} + x_t w, count_t = count_{t-1} + 1; y_t = S_t + shift_t + times, one token after another."""
    x, shift = call["x"], call["shift"]
    starts = None if call.masks is None else call.masks.starts
    sums, count = state
    out = []
    for i, x_t in enumerate(x.unbind(1)):
        if starts is not None:
            sums, count = (z.masked_fill(starts[:, i, None], 0) for z in (sums, count))
        real = torch.ones_like(count, dtype=torch.bool) if call.masks is None else call.masks.real[:, i, None]
        x_t = x_t.masked_fill(~real, 0)
        sums = torch.where(real, call["a"] * sums + x_t @ call["w"], sums)
        count = torch.where(real, count + 1, count)
        out.append(sums + call["times"] * count + (0 if shift is None else shift[:, i]))
    return torch.stack(out, 1), (sums, count)


OP = span_op(
    "test_walk", walk, timed=("x", "shift?"), fixed=("w",), options={"a": float, "times": int}, length=lambda call: 4,
    like=lambda call: (call["x"].shape, call["x"].dtype),
)


def draw(t: int, shifted: bool = True, b: int = 4) -> list[Tensor | None]:
    gen = torch.Generator().manual_seed(t)
    shapes = ((b, t, 3), (b, t, 3), (3, 3), (b, 3), (b, 1))
    x: list[Tensor | None] = [torch.randn(s, generator=gen, dtype=torch.float64).requires_grad_() for s in shapes]
    return x if shifted else [x[0], None, *x[2:]]


def whole(x, segments):
    masks = None
    if segments is not None:
        from hybridtf.ops.passes_op import Masks

        masks = Masks(segments.real, segments.effective, segments.carried)
    states = fresh(x, segments)
    y, last = walk(Call({"x": x[0], "shift": x[1]}, {"w": x[2]}, {"a": 0.9, "times": 2}, masks), states)
    return (y if masks is None else y.masked_fill(~masks.real[..., None], 0)), *last


def fresh(x, segments):
    if segments is None:
        return x[3], x[4]
    forgotten = ~segments.continues & (segments.last_id > 0)
    return x[3].masked_fill(forgotten[:, None], 0), x[4].masked_fill(forgotten[:, None], 0)


def run(x, segments=None):
    y, last = OP((x[0], x[1]), (x[2],), (0.9, 2), segments, fresh(x, segments))
    return (y, *last)


def gradients(out, x):
    loss = sum((z * torch.linspace(1, 2, z.numel()).view_as(z)).sum() for z in out)
    given = [z for z in x if z is not None]
    return torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("t", [1, 3, 4, 5, 12, 13])
def test_spans_equal_one_walk(t: int, packed: bool, shifted: bool) -> None:
    x, segments = draw(t, shifted), random_segments(t, 4, t) if packed else None
    found, expected = run(x, segments), whole(x, segments)
    for a, b in zip([*found, *gradients(found, x)], [*expected, *gradients(expected, x)], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        for a, b in zip(run(x, segments), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_no_tokens_hand_the_states_on_as_copies() -> None:
    x = draw(0)
    y, *last = run(x)
    assert y.shape == (4, 0, 3)
    for state, given in zip(last, x[3:], strict=True):
        torch.testing.assert_close(state, given, rtol=0, atol=0)
        assert state.data_ptr() != given.data_ptr()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("t", [4, 9])
def test_the_operators_are_well_formed(t: int, packed: bool) -> None:
    x = [z.detach() for z in draw(t)]
    check_operators(OP, arguments(x[:3], random_segments(t, 4, t) if packed else None, (0.9, 2)), x[3:])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_compiler_sees_one_call(packed: bool, dynamic: bool) -> None:
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for t in (9, 14, 21) if dynamic else (9,):
        ids = torch.arange(t).ge(t // 2).to(torch.int64).add(1).repeat(4, 1)
        segments = Segments.from_ids(ids, continues=True) if packed else None
        x = draw(t)
        found, expected = compiled(x, segments), whole(x, segments)
        for a, b in zip([*found, *gradients(found, x)], [*expected, *gradients(expected, x)], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_torch_func_and_second_derivatives() -> None:
    x = draw(9)
    f = lambda w: sum(z.square().sum() for z in run([*x[:2], w, *x[3:]]))  # noqa: E731
    g = lambda w: sum(z.square().sum() for z in whole([*x[:2], w, *x[3:]], None))  # noqa: E731
    torch.testing.assert_close(torch.func.grad(f)(x[2].detach()), torch.func.grad(g)(x[2].detach()))
    (first,) = torch.autograd.grad(f(x[2]), x[2], create_graph=True)
    with pytest.raises(KernelError, match="test_walk: kernel 'chunked' has no second derivatives"):
        torch.autograd.grad(first.sum(), x[2])


def test_operations_inside_are_counted() -> None:
    x = draw(13)
    with FlopCounterMode(display=False) as forward:
        out = run(x)
    with FlopCounterMode(display=False) as backward:
        gradients(out, x)
    product = 2 * 4 * 3 * 3
    assert forward.get_total_flops() == 13 * product
    assert backward.get_total_flops() == 13 * product * 3  # each span again, and two products to differentiate one
