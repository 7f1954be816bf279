"""``short_conv``: both forms against torch's own convolution, over single documents and over packed and padded rows."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from hybridtf.core.errors import ConfigError, KernelError
from hybridtf.core.kernels import KernelSet
from hybridtf.core.segments import Segments
from hybridtf.ops.short_conv import KERNELS, short_conv_reference, short_conv_taps
from tests.ops.ssd_cases import random_segments

OPS = [short_conv_reference, short_conv_taps]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(seed: int, b: int, t: int, c: int = 3, w: int = 4, dtype: torch.dtype = torch.float64) -> Inputs:
    """x, weight, bias, initial state."""
    gen = torch.Generator().manual_seed(seed)
    x, weight, bias, state = (
        torch.randn(s, generator=gen, dtype=torch.float64).to(dtype).requires_grad_()
        for s in ((b, t, c), (c, w), (c,), (b, w - 1, c))
    )
    return x, weight, bias, state


def call(op, x: Inputs, **more) -> tuple[Tensor, Tensor]:
    return op(*x[:3], initial_state=x[3], **more)


def grads(y: Tensor, state: Tensor, x: Inputs) -> list[Tensor]:
    gen = torch.Generator().manual_seed(0)
    loss = sum((z * torch.randn(z.shape, generator=gen).bfloat16().to(z.dtype)).sum() for z in (y, state))
    found = torch.autograd.grad(loss, x, allow_unused=True)
    return [torch.zeros_like(a) if g is None else g for a, g in zip(x, found, strict=True)]


def assert_same(x: Inputs, first, second, tol: float = 1e-10) -> None:
    for a, b in zip([*first, *grads(*first, x)], [*second, *grads(*second, x)], strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def torch_conv(x: Inputs, silu: bool = False) -> tuple[Tensor, Tensor]:
    """All tokens real, one document: torch's grouped convolution over [state, x]."""
    tokens = torch.cat([x[3], x[0]], 1)
    y = F.conv1d(tokens.transpose(1, 2), x[1][:, None], x[2], groups=x[1].shape[0]).transpose(1, 2)
    return F.silu(y) if silu else y, tokens[:, x[0].shape[1] :]


def alone(x: Inputs, segments: Segments, silu: bool = False) -> tuple[Tensor, Tensor]:
    """Every document by itself through torch's convolution; the state is that of each row's last document."""
    y, states = torch.zeros_like(x[0]), []
    for row, (ids, continues) in enumerate(zip(segments.ids, segments.continues, strict=True)):
        state = x[3][row : row + 1]
        for i, doc in enumerate(sorted(set(ids.tolist()) - {0})):
            at = (ids == doc).nonzero()[:, 0]
            first = state if i == 0 and continues else torch.zeros_like(state)
            part, state = torch_conv((x[0][row : row + 1, at], x[1], x[2], first), silu)
            y = y.index_put((torch.tensor(row), at), part[0])
        states.append(state[0])
    return y, torch.stack(states)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("w", [1, 2, 4, 7])
@pytest.mark.parametrize("t", [1, 2, 3, 4, 5, 17, 64])
def test_equals_torch_convolution(op, t: int, w: int) -> None:
    x = inputs(t, 2, t, w=w)
    assert_same(x, call(op, x), torch_conv(x))
    assert_same(x, call(op, x, activation="silu"), torch_conv(x, silu=True))
    y, state = op(x[0], x[1])
    none = (x[0], x[1], torch.zeros_like(x[2]), torch.zeros_like(x[3]))
    torch.testing.assert_close(y, torch_conv(none)[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state, torch_conv(none)[1], rtol=0, atol=0)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("t", [1, 2, 3, 16, 31, 50])
def test_each_document_as_if_alone(op, t: int, activation: str | None) -> None:
    for w in (1, 2, 4):
        x, segments = inputs(t, 6, t, w=w), random_segments(7 * t + w, 6, t)
        assert_same(x, call(op, x, segments=segments, activation=activation), alone(x, segments, activation == "silu"))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("lengths", [[5, 11, 3, 13], [5, 1, 9, 3], [0, 1, 0, 1], [3, 0, 4], [0, 0], [2], []])
@pytest.mark.parametrize("continues", [False, True])
def test_packed_documents_some_empty(op, lengths: list[int], continues: bool) -> None:
    t = sum(lengths)
    x, segments = inputs(1, 1, t), Segments.from_lengths([lengths], continues=continues)
    y, state = call(op, x, segments=segments)
    assert y.shape == x[0].shape
    if t:
        assert_same(x, (y, state), alone(x, segments))
    else:
        assert torch.equal(state, x[3])


@pytest.mark.parametrize("op", OPS)
def test_pads_in_the_middle_are_skipped(op) -> None:
    x = inputs(1, 1, 11)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]])
    y, state = call(op, x, segments=Segments.from_mask(mask))
    own, last = torch_conv((x[0][:, mask[0] > 0], *x[1:]))
    torch.testing.assert_close(y[:, mask[0] > 0], own, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state, last, rtol=0, atol=0)
    assert not y[:, 3:7].any()


@pytest.mark.parametrize("op", OPS)
def test_decoding_goes_on_from_a_padded_prefill(op) -> None:
    x = inputs(6, 2, 15)
    mask = torch.arange(12) < torch.tensor([[7], [12]])
    _, state = op(x[0][:, :12], *x[1:3], segments=Segments.from_mask(mask))
    _, short = op(x[0][:1, :7], *x[1:3])
    torch.testing.assert_close(state[:1], short, rtol=0, atol=0)
    torch.testing.assert_close(state, torch.stack([x[0][0, 4:7], x[0][1, 9:12]]), rtol=0, atol=0)
    for i in range(12, 15):
        y, state = op(x[0][:, i : i + 1], *x[1:3], initial_state=state)
        own, short = op(x[0][:1, i : i + 1], *x[1:3], initial_state=short)
        torch.testing.assert_close(y[:1], own, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("t", [1, 5])
def test_rows_of_pads_leave_the_state_untouched(op, t: int) -> None:
    x = inputs(3, 2, t)
    segments = Segments.from_mask(torch.zeros(2, t), continues=torch.tensor([True, False]))
    y, state = call(op, x, segments=segments, activation="silu")
    assert not y.any()
    assert torch.equal(state, x[3])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("t", [1, 11])
@pytest.mark.parametrize("garbage", [1e30, float("nan")])
def test_content_of_pads_and_of_dropped_states_has_no_effect(op, t: int, garbage: float) -> None:
    x, segments = inputs(5, 8, t, dtype=torch.float32), random_segments(5, 8, t)
    if t == 1:
        segments = Segments.from_ids(torch.tensor([[0], [1]] * 4), continues=torch.arange(8) < 4)
    dropped = ~segments.continues & (segments.last_id > 0)
    assert dropped.any()
    tokens, state = x[0].detach().clone(), x[3].detach().clone()
    tokens[~segments.real], state[dropped] = garbage, garbage
    dirty = (tokens.requires_grad_(), *x[1:3], state.requires_grad_())
    first, second = (call(op, z, segments=segments, activation="silu") for z in (x, dirty))
    for a, b in zip((*first, *grads(*first, x)), (*second, *grads(*second, dirty)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_cut_law(op, packed: bool) -> None:
    x, segments = inputs(9, 4, 23), random_segments(9, 4, 23) if packed else None
    whole = call(op, x, segments=segments, activation="silu")
    expected = [*whole, *grads(*whole, x)]
    rng = random.Random(0)
    every = [[*range(1, 23)], [1, 3, 4, 7], [0, 0, 23]]
    for cuts in [*every, *(sorted(rng.choices(range(24), k=rng.randint(1, 8))) for _ in range(12))]:
        state, out = x[3], []
        for start, stop in itertools.pairwise([0, *cuts, 23]):
            part = None if segments is None else segments.narrow(start, stop)
            y, state = op(x[0][:, start:stop], *x[1:3], initial_state=state, segments=part, activation="silu")
            out.append(y)
        y = torch.cat(out, 1)
        for a, b in zip([y, state, *grads(y, state, x)], expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("op", OPS)
def test_the_last_tap_reads_the_token_itself_and_nothing_later(op) -> None:
    weight = torch.tensor([[0.0, 0.0, 0.0, 1.0]] * 2)
    x = torch.arange(20.0)[None, :, None].expand(1, 20, 2)
    assert torch.equal(op(x, weight)[0], x)
    case = inputs(0, 1, 20)
    (dx,) = torch.autograd.grad(call(op, case)[0][:, :9].square().sum(), case[0])
    assert not dx[:, 9:].any()


@pytest.mark.parametrize("op", OPS)
def test_gradcheck(op) -> None:
    segments = Segments.from_ids(torch.tensor([[0, 1, 0, 1, 2, 2], [4, 4, 0, 6, 6, 0]]), continues=True)
    x = inputs(0, 2, 6, c=2, w=3)
    for more in ({}, {"activation": "silu"}, {"segments": segments, "activation": "silu"}):
        assert torch.autograd.gradcheck(lambda *a, more=more: call(op, a, **more), x)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("packed", [False, True])
def test_empty_shapes(op, packed: bool) -> None:
    for b, t in ((0, 5), (0, 1), (0, 0), (2, 0)):
        x = inputs(0, b, t)
        segments = Segments.from_mask(torch.ones(b, t)) if packed else None
        y, state = call(op, x, segments=segments)
        assert y.shape == (b, t, 3)
        assert torch.equal(state, x[3])
        assert torch.equal(torch.autograd.grad(state.sum() + y.sum(), x[3])[0], torch.ones_like(state))


@pytest.mark.parametrize("packed", [False, True])
def test_blocks_of_time_and_strided_inputs(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridtf.ops.short_conv.taps.BLOCK_ELEMENTS", 2 * 3 * 5)
    x = inputs(2, 2, 33)
    x = (x[0].detach().mT.contiguous().mT.requires_grad_(), x[1].detach().t().contiguous().t().requires_grad_(), *x[2:])
    assert not x[0].is_contiguous()
    segments = random_segments(2, 2, 33) if packed else None
    first, second = (call(op, x, segments=segments, activation="silu") for op in OPS)
    assert_same(x, first, second)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("t", [1, 40])
def test_bfloat16_sums_in_float32(packed: bool, t: int) -> None:
    x = inputs(2, 2, t, c=16, dtype=torch.bfloat16)
    exact = tuple(z.detach().double().requires_grad_() for z in x)
    segments = random_segments(2, 2, t) if packed else None
    found, expected = call(short_conv_taps, x, segments=segments), call(short_conv_reference, exact, segments=segments)
    assert found[0].dtype == found[1].dtype == torch.bfloat16
    assert torch.equal(found[1].double(), expected[1])
    # Half a unit in the last place of a bfloat16: the sum itself is not rounded on the way.
    torch.testing.assert_close(found[0].double(), expected[0], rtol=2**-8, atol=1e-6)
    for a, b in zip(grads(*found, x), grads(*expected, exact), strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a.double(), b, rtol=4e-2, atol=4e-2)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("t", [1, 21])
def test_compiles_whole(packed: bool, t: int) -> None:
    x = inputs(1, 2, t)
    segments = Segments.from_lengths([[t // 2, t - t // 2]] * 2, continues=True) if packed else None
    compiled = torch.compile(short_conv_taps, backend="eager", fullgraph=True)
    first = call(compiled, x, segments=segments, activation="silu")
    assert_same(x, first, call(short_conv_reference, x, segments=segments, activation="silu"))


def test_a_state_does_not_hold_the_sequence() -> None:
    for t in (1, 500):
        for segments in (None, Segments.from_mask(torch.ones(1, t))):
            _, state = short_conv_taps(torch.randn(1, t, 3), torch.randn(3, 4), segments=segments)
            assert state.untyped_storage().nbytes() <= 4 * 3 * 4 * 4


def test_the_backward_keeps_the_tokens_alone() -> None:
    saved: dict[int, int] = {}

    def keep(z: Tensor) -> Tensor:
        saved[z.untyped_storage().data_ptr()] = z.untyped_storage().nbytes()
        return z

    x = inputs(0, 1, 4096, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda z: z):
        call(short_conv_taps, x, activation="silu")
    assert sum(saved.values()) < 1.1 * 2 * x[0].numel()


@pytest.mark.parametrize("activation", [None, "silu"])
def test_second_derivatives_are_refused_not_wrong(activation: str | None) -> None:
    x = inputs(0, 1, 9)
    ys = [call(op, x, activation=activation)[0] for op in OPS]
    expected, first = (torch.autograd.grad(y.square().sum(), x, create_graph=True) for y in ys)
    for a, b in zip(first, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        with pytest.raises(KernelError, match="no second derivatives"):
            torch.autograd.grad(a.sum(), x[0], retain_graph=True)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("t", [1, 20])
def test_torch_func_and_checkpointing(t: int, packed: bool) -> None:
    x, segments = inputs(3, 2, t), random_segments(3, 2, t) if packed else None

    def loss(op, *a: Tensor) -> Tensor:
        y, state = call(op, a, segments=segments, activation="silu")
        return y.square().sum() + state.square().sum()

    found, expected = (torch.func.grad(loss, (1, 2, 3, 4))(op, *(z.detach() for z in x)) for op in OPS)
    saved = torch.autograd.grad(checkpoint(loss, short_conv_taps, *x, use_reentrant=False), x)
    for a, b, c in zip(found, expected, saved, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(c, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("packed", [False, True])
def test_one_graph_for_many_lengths(packed: bool) -> None:
    counter = CompileCounter()
    compiled = torch.compile(short_conv_taps, backend=counter, fullgraph=True, dynamic=True)
    for t in (5, 6, 31, 64, 100, 200, 260, 2):
        x, segments = inputs(t, 2, t), None
        if packed:
            segments = Segments.from_lengths([[t // 2, t - t // 2]] * 2, continues=True)
        first, second = (call(op, x, segments=segments, activation="silu") for op in (compiled, short_conv_reference))
        assert_same(x, first, second)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("op", OPS)
def test_wrong_arguments_are_refused(op) -> None:
    x, weight, bias, state = inputs(0, 2, 8)
    with pytest.raises(ConfigError, match="the past tokens alone"):
        op(x, weight, bias, initial_state=torch.zeros(2, 4, 3))
    with pytest.raises(ConfigError, match="weight"):
        op(x, weight.t(), bias)
    with pytest.raises(ConfigError, match="bias must be"):
        op(x, weight, bias[:1])
    with pytest.raises(ConfigError, match="segments must be"):
        op(x, weight, segments=Segments.from_mask(torch.ones(2, 7)))
    with pytest.raises(ConfigError, match="Did you mean 'silu'"):
        op(x, weight, initial_state=state, activation="sliu")


def test_kernels_are_registered() -> None:
    kernels = KernelSet(KERNELS)
    assert [k.name for k in kernels.of("short_conv")] == ["taps", "reference"]
    op = kernels.bind("short_conv", device=torch.device("cpu"), dtype=torch.float64)
    x = inputs(0, 2, 9)
    assert torch.equal(op(*x[:3], n_tokens=9, initial_state=x[3])[0], call(short_conv_taps, x)[0])
    assert kernels.get("short_conv", "reference").load() is short_conv_reference
