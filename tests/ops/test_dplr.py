"""``dplr`` against other people's loop, its own at extreme numbers, and as an operator; the kit holds it to its reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from hybridtf.core.errors import ConfigError
from hybridtf.interop.strict import StrictFloat64
from hybridtf.ops.dplr import dplr_chunked, dplr_combine, dplr_reference, dplr_summary
from tests.ops.live_bytes import Peak
from tests.ops.operators import arguments, check_operators
from tests.ops.ssd_cases import random_segments
from tests.peers import peer

FORMS = (dplr_reference, dplr_chunked)


def draw(t: int, *, b: int = 2, h: int = 3, k: int = 5, p: int = 4, dtype: torch.dtype = torch.float64, decay: float = 0.6):
    gen = torch.Generator().manual_seed(t)
    q, key, u, r = (torch.randn(b, t, h, k, generator=gen, dtype=torch.float64) for _ in range(4))
    v = torch.randn(b, t, h, p, generator=gen, dtype=torch.float64)
    log_w = -torch.rand(b, t, h, k, generator=gen, dtype=torch.float64) * decay
    state = torch.randn(b, h, k, p, generator=gen, dtype=torch.float64)
    given = (q, key, v, log_w, 0.9 * F.normalize(u, dim=-1), F.normalize(r, dim=-1), state)
    return [x.to(dtype).requires_grad_() for x in given]


def gradients(out, given):
    loss = sum((z.double() * torch.linspace(1, 2, z.numel(), dtype=torch.float64).view_as(z)).sum() for z in out)
    return torch.autograd.grad(loss, given)


@pytest.mark.parametrize("op", FORMS)
@pytest.mark.parametrize("t", [1, 7, 37])
def test_against_the_loop_of_fla(op, t: int) -> None:
    """Their alpha is r, their beta u; their layout is head-first, and q is scaled inside."""
    x = draw(t)
    q, k, v, log_w, u, r, state = x
    with StrictFloat64():
        heads = [z.transpose(1, 2) for z in (q * q.shape[-1] ** 0.5, k, v, r, u, log_w)]
        y, last = peer("fla/ops/generalized_delta_rule/dplr/naive.py").dplr_recurrence(*heads, initial_state=state)
    expected = (y.transpose(1, 2), last)
    found = op(*x[:6], initial_state=state, chunk_size=8)
    for a, b in zip([*found, *gradients(found, x)], [*expected, *gradients(expected, x)], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_gradcheck() -> None:
    x = draw(6, b=1, h=1, k=3, p=2)
    for op in FORMS:
        assert torch.autograd.gradcheck(lambda *z, op=op: op(*z[:6], initial_state=z[6], chunk_size=4), x)


@pytest.mark.parametrize("chunk_size", [1, 3, 16, 64])
def test_every_chunk_size_is_the_same(chunk_size: int) -> None:
    x, segments = draw(41, b=6), random_segments(4, 6, 41)
    given = {"initial_state": x[6], "segments": segments}
    found, expected = dplr_chunked(*x[:6], chunk_size=chunk_size, **given), dplr_reference(*x[:6], **given)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("decay", [0.606531, 5.0, 300.0, float("inf")])
def test_strong_decays_in_float32(decay: float) -> None:
    """RWKV-7's strongest decay, decays that underflow, and none of the past: values and gradients of float64."""
    x = draw(150, decay=1.0)
    x[3] = (x[3].detach() - 1.0).mul(decay).requires_grad_() if decay > 1 else x[3]
    expected = dplr_reference(*x[:6], initial_state=x[6])
    of = gradients(expected, x)
    narrow = [z.detach().float().requires_grad_() for z in x]
    found = dplr_chunked(*narrow[:6], initial_state=narrow[6])
    for a, b in zip([*found, *gradients(found, narrow)], [*expected, *of], strict=True):
        assert bool(torch.isfinite(a).all())
        torch.testing.assert_close(a.double(), b, rtol=2e-4, atol=2e-4 * float(b.detach().abs().max() + 1))


def test_long_inputs_keep_float32s_digits() -> None:
    """A delta rule that reflects (keys of length 1, twice erased, no decay): the state lives on through 3000 tokens."""
    x = [z.detach() for z in draw(3000, b=1, h=1)]
    key = F.normalize(x[1], dim=-1)
    x[1], x[2], x[3], x[4], x[5] = 0.01 * key, 0.01 * x[2], 0 * x[3], -2 * key, key
    expected, _ = dplr_reference(*x[:6], initial_state=x[6])
    found, _ = dplr_chunked(*(z.float() for z in x[:6]), initial_state=x[6].float())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


class Exponents(TorchFunctionMode):
    """Fails where an exponential of a positive number is taken."""

    seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "exp":
            self.seen += 1
            assert float(args[0].detach().max()) <= 0
        return func(*args, **(kwargs or {}))


def test_no_exponential_of_a_positive_number() -> None:
    from hybridtf.ops.dplr.spans import NAMES, span
    from hybridtf.ops.passes_op import Call

    x = [z.detach() for z in draw(40)]
    with Exponents() as mode:
        span(Call(dict(zip(NAMES, x, strict=False)), {}, {"chunk_size": 16}, None), (x[6],))
    assert mode.seen


@pytest.mark.parametrize("packed", [False, True])
def test_summaries_join(packed: bool) -> None:
    """Two stretches as maps, one after the other, do to a state what one call does."""
    x, segments = [z.detach() for z in draw(29, b=6)], random_segments(7, 6, 29)
    segments = segments if packed else None
    _, expected = dplr_reference(*x[:6], initial_state=x[6], segments=segments)
    maps = []
    for start, stop in ((0, 13), (13, 29)):
        part = None if segments is None else segments.narrow(start, stop)
        maps.append(dplr_summary(*(z[:, start:stop] for z in x[1:6]), segments=part, chunk_size=4))
    A, S = dplr_combine(*maps)
    start = x[6]
    if segments is not None:
        start = start.masked_fill((~segments.continues & (segments.last_id > 0))[:, None, None, None], 0)
    torch.testing.assert_close(A @ start + S, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("packed", [False, True])
def test_the_operators_are_well_formed(packed: bool) -> None:
    from hybridtf.ops.dplr.chunked import _OP

    x, s = [z.detach() for z in draw(9, b=4)], random_segments(9, 4, 9)
    check_operators(_OP, arguments(x[:6], s if packed else None, (4,)), [x[6]])


def test_a_compiler_sees_one_call() -> None:
    x = draw(11)
    run = lambda *z: dplr_chunked(*z[:6], initial_state=z[6], chunk_size=4)  # noqa: E731
    found, expected = torch.compile(run, backend="aot_eager", fullgraph=True)(*x), run(*x)
    for a, b in zip([*found, *gradients(found, x)], [*expected, *gradients(expected, x)], strict=True):
        torch.testing.assert_close(a, b)


def test_calls_grow_with_chunks_alone() -> None:
    from hybridtf.ops.dplr.spans import NAMES, span
    from hybridtf.ops.passes_op import Call

    counts = []
    for t in (512, 4096):
        x = [z.detach() for z in draw(t, b=1, h=1)]
        with Peak() as mode:
            span(Call(dict(zip(NAMES, x, strict=False)), {}, {"chunk_size": 32}, None), (x[6],))
        counts.append(mode.calls)
    per_chunk = (counts[1] - counts[0]) / (128 - 16)
    assert per_chunk <= 8
    assert counts[0] < 640


def test_what_does_not_fit_is_refused() -> None:
    q, k, v, log_w, u, r, state = draw(3)
    for op in FORMS:
        with pytest.raises(ConfigError, match=r"dplr: log_w must be \(2, 3, 3, 5\), or \(2, 3, 3, 1\)"):
            op(q, k, v, log_w[..., :2], u, r)
        with pytest.raises(ConfigError, match="dplr: r must have the shape of k"):
            op(q, k, v, log_w, u, r[:, :2])
        with pytest.raises(ConfigError, match="dplr: initial_state must be"):
            op(q, k, v, log_w, u, r, initial_state=state[:1])
        with pytest.raises(ConfigError, match="dplr: chunk_size must be 1 or more; got 0"):
            op(q, k, v, log_w, u, r, chunk_size=0)
