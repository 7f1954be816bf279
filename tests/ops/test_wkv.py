"""``wkv`` against transformers' loop, at extreme numbers, and as an operator; the kit holds it to its reference."""

from __future__ import annotations

import pytest
import torch
from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

from hybridtf.core.errors import ConfigError
from hybridtf.interop.strict import StrictFloat64
from hybridtf.ops.wkv import wkv_chunked, wkv_reference
from tests.ops.live_bytes import Peak
from tests.ops.operators import arguments, check_operators
from tests.ops.ssd_cases import random_segments

FORMS = (wkv_reference, wkv_chunked)


def draw(t: int, *, b: int = 2, c: int = 5, keys: float = 2.0):
    gen = torch.Generator().manual_seed(t)
    k, v = (torch.randn(b, t, c, generator=gen, dtype=torch.float64) for _ in range(2))
    decay, u = (torch.randn(c, generator=gen, dtype=torch.float64) for _ in range(2))
    state = [torch.randn(b, c, generator=gen, dtype=torch.float64) for _ in range(3)]
    given = (k * keys, v, decay, u, state[0], 1 + state[1].abs(), state[2])
    return [x.requires_grad_() for x in given]


def run(op, x, **more):
    k, v, decay, u, *state = x
    y, last = op(k, v, -decay.exp(), u, initial_state=tuple(state), **more)
    return (y, *last)


def gradients(out, given):
    loss = sum((z.double() * torch.linspace(1, 2, z.numel(), dtype=torch.float64).view_as(z)).sum() for z in out)
    return torch.autograd.grad(loss, given)


@pytest.mark.parametrize("op", FORMS)
@pytest.mark.parametrize("t", [1, 6, 37])
@pytest.mark.parametrize("keys", [2.0, 300.0])
def test_against_the_loop_of_transformers(op, t: int, keys: float) -> None:
    x = draw(t, keys=keys)
    with StrictFloat64():
        y, last = rwkv_linear_attention_cpu(x[2], x[3], x[0], x[1], state=tuple(x[4:]), return_state=True)
    expected, found = (y, *last), run(op, x, chunk_size=8)
    for a, b in zip([*found, *gradients(found, x)], [*expected, *gradients(expected, x)], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_gradcheck() -> None:
    x = draw(6, b=1, c=2)
    for op in FORMS:
        assert torch.autograd.gradcheck(lambda *z, op=op: run(op, z, chunk_size=4), x)


@pytest.mark.parametrize("op", FORMS)
def test_the_first_token_is_its_own_mean(op) -> None:
    """A state of zeros has seen nothing, however small the first key is."""
    k, v = torch.full((1, 2, 3), -1e4), torch.randn(1, 2, 3)
    zero = torch.zeros(1, 3)
    for state in (None, (zero, zero, zero)):
        y, _ = op(k[:, :1], v[:, :1], -torch.ones(3), torch.zeros(3), initial_state=state)
        torch.testing.assert_close(y, v[:, :1])
        y, _ = op(k, v, -torch.ones(3), torch.zeros(3), initial_state=state)
        torch.testing.assert_close(y, torch.stack([v[:, 0], v.mean(1)], 1))


@pytest.mark.parametrize("chunk_size", [1, 3, 16, 64])
def test_every_chunk_size_is_the_same(chunk_size: int) -> None:
    x, segments = draw(41, b=6), random_segments(4, 6, 41)
    found = run(wkv_chunked, x, segments=segments, chunk_size=chunk_size)
    expected = run(wkv_reference, x, segments=segments)
    for a, b in zip([*found, *gradients(found, x)], [*expected, *gradients(expected, x)], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("keys", [1.0, 1e4])
@pytest.mark.parametrize("log_w", [0.0, -1e-4, -50.0, float("-inf")])
def test_long_inputs_in_float32(keys: float, log_w: float) -> None:
    x = [z.detach() for z in draw(2000, b=1, keys=keys)]
    k, v, w, u = x[0], x[1], torch.full_like(x[2], log_w), x[3]
    expected, last = wkv_reference(k, v, w, u)
    found, state = wkv_chunked(k.float(), v.float(), w.float(), u.float())
    # A key is rounded before it is an exponent.
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6 * max(keys, 20))
    torch.testing.assert_close(state[2].double(), last[2], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_the_operators_are_well_formed(packed: bool) -> None:
    from hybridtf.ops.wkv.chunked import _OP

    x, s = [z.detach() for z in draw(9, b=4)], random_segments(9, 4, 9)
    check_operators(_OP, arguments((x[0], x[1], -x[2].exp(), x[3]), s if packed else None, (4,)), x[4:])


def test_a_compiler_sees_one_call() -> None:
    x = draw(11)
    compiled = torch.compile(lambda *z: run(wkv_chunked, z, chunk_size=4), backend="aot_eager", fullgraph=True)
    found, expected = compiled(*x), run(wkv_chunked, x, chunk_size=4)
    for a, b in zip([*found, *gradients(found, x)], [*expected, *gradients(expected, x)], strict=True):
        torch.testing.assert_close(a, b)


def test_calls_grow_with_chunks_alone() -> None:
    from hybridtf.ops.passes_op import Call
    from hybridtf.ops.wkv.spans import span

    counts = []
    for t in (512, 4096):
        x = [z.detach() for z in draw(t, b=1)]
        with Peak() as mode:
            span(Call({"k": x[0], "v": x[1]}, {"log_w": -x[2].exp(), "u": x[3]}, {"chunk_size": 32}, None), tuple(x[4:]))
        counts.append(mode.calls)
    assert (counts[1] - counts[0]) / (128 - 16) <= 32  # one merge a chunk
    assert counts[0] < 1024


def test_what_does_not_fit_is_refused() -> None:
    k, v, w, u, *state = (z.detach() for z in draw(3))
    for op in FORMS:
        with pytest.raises(ConfigError, match="wkv: k and v must be"):
            op(k, v[:, :2], w, u)
        with pytest.raises(ConfigError, match=r"wkv: u must be \(c\) = \(5,\); got \(4,\)"):
            op(k, v, w, u[:4])
        with pytest.raises(ConfigError, match="wkv: initial_state must be num, den and max"):
            op(k, v, w, u, initial_state=tuple(state[:2]))
