"""``gated_delta_rule`` against other people's references, in hard numbers, and under what rewrites functions."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hybridtf.core.errors import ConfigError, KernelError
from hybridtf.core.segments import Segments
from hybridtf.interop.strict import StrictFloat64
from hybridtf.ops.gated_delta_rule import (
    gated_delta_rule_chunked,
    gated_delta_rule_combine,
    gated_delta_rule_reference,
    gated_delta_rule_summary,
)
from hybridtf.ops.gated_delta_rule.chunked import _OP
from hybridtf.ops.gated_delta_rule.inverse import unit_inverse
from tests.ops.live_bytes import Peak
from tests.ops.operators import arguments, check_operators
from tests.ops.ssd_cases import random_segments
from tests.peers import peer

FORMS = [gated_delta_rule_reference, gated_delta_rule_chunked]


def draw(
    t: int, g: int = 2, h: int = 4, k: int = 5, p: int = 3, decay: str = "head", strength: float = 0.5, steps: int = 1,
    b: int = 2, top: float = 2.0,
) -> list[Tensor | None]:
    """q, k, v, beta, log_a and a state in float64."""
    gen = torch.Generator().manual_seed(t)
    sub = (steps,) if steps > 1 else ()
    shapes = ((b, t, g, k), (b, t, *sub, g, k), (b, t, *sub, h, p), (b, t, *sub, h), (b, t, h, k)[: 3 + (decay == "channel")])
    q, key, v, beta, log_a = (torch.randn(s, generator=gen, dtype=torch.float64) for s in shapes)
    state = torch.randn(b, h, k, p, generator=gen, dtype=torch.float64)
    x = [q, F.normalize(key, dim=-1), v, top * beta.sigmoid(), None if decay == "none" else -log_a.abs() * strength, state]
    return [None if z is None else z.detach().requires_grad_() for z in x]


def run(op, x, **more):
    return op(*x[:5], initial_state=x[5], **more)


def same(x, first, second, tol: float = 1e-10) -> None:
    for a, b in zip([*first, *grads(first, x)], [*second, *grads(second, x)], strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def grads(out, x) -> list[Tensor]:
    loss = sum((z.double() * torch.linspace(1, 2, z.numel(), dtype=torch.float64).view_as(z).sin()).sum() for z in out)
    return list(torch.autograd.grad(loss, [z for z in x if z is not None]))


# -- other people's references -------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", FORMS)
def test_equals_flas_gated_delta_rule(op) -> None:
    x = draw(11, g=3, h=3)
    naive = peer("fla/ops/gated_delta_rule/naive.py").naive_recurrent_gated_delta_rule
    with StrictFloat64():
        want = naive(*x[:5], scale=1.0, initial_state=x[5], output_final_state=True)
    same(x, run(op, x, chunk_size=4), want)


@pytest.mark.parametrize("op", FORMS)
def test_equals_flas_kda(op) -> None:
    x = draw(11, g=2, h=6, decay="channel")
    naive = peer("fla/ops/kda/naive.py").naive_recurrent_kda
    with StrictFloat64():
        q, k, v, beta, log_a, state = x
        want = naive(q, k, v, log_a, beta, 1.0, state, output_final_state=True)
    same(x, run(op, x, chunk_size=4), want)


@pytest.mark.parametrize("op", FORMS)
def test_equals_flas_delta_rule(op) -> None:
    x = draw(11, g=3, h=3, decay="none")
    naive = peer("fla/ops/delta_rule/naive.py").delta_rule_recurrence
    with StrictFloat64():
        q, k, v = (z.transpose(1, 2) for z in x[:3])
        y, state = naive(q * q.shape[-1] ** 0.5, k, v, x[3].mT, initial_state=x[5])
    same(x, run(op, x, chunk_size=4), (y.transpose(1, 2), state))


@pytest.mark.parametrize("op", FORMS)
@pytest.mark.parametrize("decay", ["none", "head"])
@pytest.mark.parametrize("steps", [2, 3])
def test_equals_flas_gated_delta_product(op, decay: str, steps: int) -> None:
    x = draw(7, g=3, h=3, steps=steps, decay=decay)
    naive = peer("fla/ops/gated_delta_product/naive.py").naive_recurrent_gated_delta_product
    q, k, v, beta, log_a, state = x
    with StrictFloat64():
        rows = (z.flatten(1, 2) for z in (k, v))
        want = naive(q, *rows, log_a, beta.flatten(1, 2), 1.0, initial_state=state, num_householder=steps)
    same(x, run(op, x, chunk_size=8), want)


@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_equals_transformers(name: str) -> None:
    """Groups of value heads; q is scaled inside theirs."""
    x = draw(21, g=2, h=6)
    theirs = getattr(importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next"), name)
    q, k, v, beta, log_a, state = x
    with StrictFloat64():
        more = {"initial_state": state, "output_final_state": True, "chunk_size": 8}
        want = theirs(q * q.shape[-1] ** 0.5, k, v, g=log_a, beta=beta, **more)
    same(x, run(gated_delta_rule_chunked, x, chunk_size=8), want)


# -- chunks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decay", "steps"), [("head", 1), ("channel", 1), ("none", 3), ("head", 2), ("channel", 2)])
@pytest.mark.parametrize("budget", [1, 2**18])
def test_spans_and_odd_chunks(decay: str, steps: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridtf.ops.spans.SPAN_BUDGET", budget)
    for t, chunk in ((9, 1), (23, 7), (33, 16)):
        x, segments = draw(t, steps=steps, decay=decay, b=4), random_segments(t, 4, t)
        expected = run(gated_delta_rule_reference, x, segments=segments)
        same(x, run(gated_delta_rule_chunked, x, segments=segments, chunk_size=chunk), expected)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13])
def test_inverse_of_a_triangle(rows: int) -> None:
    a = torch.randn(3, 2, rows, rows, dtype=torch.float64).tril(-1).requires_grad_()
    want = torch.linalg.inv(torch.eye(rows, dtype=torch.float64) + a.tril(-1))
    torch.testing.assert_close(unit_inverse(a), want)
    weight = torch.randn_like(want)
    for found, expected in zip(*(torch.autograd.grad((z * weight).sum(), a) for z in (unit_inverse(a), want)), strict=True):
        torch.testing.assert_close(found, expected)


def test_gradients_of_the_reference() -> None:
    for decay, steps in (("head", 1), ("channel", 2)):
        x = draw(3, g=1, h=2, k=2, p=2, decay=decay, steps=steps, b=1)
        f = lambda *z: gated_delta_rule_reference(*z[:5], initial_state=z[5])  # noqa: E731
        assert torch.autograd.gradcheck(f, x)
        assert torch.autograd.gradgradcheck(f, x)


@pytest.mark.parametrize(("decay", "steps"), [("none", 1), ("head", 1), ("channel", 1), ("head", 2)])
def test_summaries_put_together_are_the_whole(decay: str, steps: int) -> None:
    x, segments = draw(19, decay=decay, steps=steps, b=5), random_segments(19, 5, 19)
    _, want = run(gated_delta_rule_chunked, x, segments=segments)
    given = [z if z is None else z.detach() for z in x]
    parts = []
    for start, stop in ((0, 6), (6, 7), (7, 19)):
        cut = [None if z is None else z[:, start:stop] for z in given[1:5]]
        parts.append(gated_delta_rule_summary(*cut, segments=segments.narrow(start, stop), chunk_size=4))
    for first in (
        gated_delta_rule_combine(gated_delta_rule_combine(parts[0], parts[1]), parts[2]),
        gated_delta_rule_combine(parts[0], gated_delta_rule_combine(parts[1], parts[2])),
    ):
        torch.testing.assert_close(first[0] @ given[5] + first[1], want, rtol=1e-11, atol=1e-11)


# -- numbers --------------------------------------------------------------------------------------------------------


def narrow(x: list[Tensor | None], dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    return [None if z is None else z.detach().to(dtype).requires_grad_() for z in x]


def wide(x: list[Tensor | None]) -> list[Tensor | None]:
    return narrow(x, torch.float64)


def close(x: list[Tensor | None], tol: float, **more) -> None:
    """float32 against the reference of the very same numbers in float64, relative to each tensor's largest entry."""
    exact = wide(x)
    found, want = run(gated_delta_rule_chunked, x, **more), run(gated_delta_rule_reference, exact)
    for a, b in zip([*found, *grads(found, x)], [*want, *grads(want, exact)], strict=True):
        a, b = a.detach(), b.detach()
        assert bool(a.isfinite().all())
        assert float((a - b).abs().max()) <= tol * max(1e-6, float(b.abs().max()))


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_turning_rates_and_keys_that_are_nearly_one(decay: str) -> None:
    """b between 1.9 and 2, keys at an angle of a few degrees: the powers of the matrix in the chunk reach 1e18."""
    x = draw(512, g=1, h=2, k=16, p=8, decay=decay, strength=1e-3, b=1)
    with torch.no_grad():
        x[1] = F.normalize(torch.ones_like(x[1]) + 0.1 * x[1], dim=-1)
        x[3] = 1.9 + 0.1 * torch.rand_like(x[3])
    close(narrow(x), 1e-4)


@pytest.mark.parametrize("decay", ["head", "channel"])
@pytest.mark.parametrize("strength", [1e-3, 5.0, 300.0])
def test_decays_of_any_strength(decay: str, strength: float) -> None:
    close(narrow(draw(150, k=8, p=8, decay=decay, strength=strength, b=1)), 3e-5)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_weak_decays_after_strong_ones(decay: str) -> None:
    """Sums along a chunk in float32, and differences of them, would lose what the weak steps are."""
    x = draw(128, k=8, p=8, decay=decay, strength=1e-4, b=1, top=0.05)
    with torch.no_grad():
        x[4][:, 5] = -80.0
        x[4][:, 70] = -30.0
    close(narrow(x), 3e-6)


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_a_decay_to_zero_forgets_everything(decay: str) -> None:
    x = draw(20, decay=decay)
    with torch.no_grad():
        x[4][:, 9] = -torch.inf
    whole, _ = run(gated_delta_rule_chunked, x, chunk_size=8)
    later = [None if z is None else z[:, 9:] for z in x[:5]]
    alone, _ = gated_delta_rule_chunked(*later, chunk_size=8)
    torch.testing.assert_close(whole[:, 9:], alone)
    assert all(bool(z.isfinite().all()) for z in torch.autograd.grad(whole.sum(), x[:4]))


def test_long_inputs_stay_bounded() -> None:
    x = narrow(draw(4096, g=1, h=1, k=8, p=4, decay="none", b=1))
    with torch.no_grad():
        found, want = run(gated_delta_rule_chunked, x), run(gated_delta_rule_reference, wide(x))
    for a, b in zip(found, want, strict=True):
        assert float((a - b).abs().max()) < 1e-4 * float(b.abs().max())


def test_bfloat16_keeps_the_memory_in_float32() -> None:
    x = narrow(draw(40, b=1), torch.bfloat16)
    y, state = run(gated_delta_rule_chunked, x)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    exact = run(gated_delta_rule_reference, wide(x))
    torch.testing.assert_close(state.double(), exact[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y.double(), exact[0], rtol=1e-2, atol=1e-2)


# -- what rewrites functions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decay", "steps"), [("none", 1), ("channel", 2)])
def test_the_operators_are_well_formed(decay: str, steps: int) -> None:
    x = [None if z is None else z.detach() for z in draw(9, decay=decay, steps=steps, b=3)]
    s = random_segments(9, 3, 9)
    check_operators(_OP, arguments(x[:5], s, (8,)), [x[5]])


def test_compiler_sees_one_call() -> None:
    compiled = torch.compile(lambda x, s: run(gated_delta_rule_chunked, x, segments=s), backend="aot_eager", fullgraph=True)
    x = draw(21, decay="channel")
    ids = torch.arange(21).ge(9).to(torch.int64).add(1).repeat(2, 1)
    segments = Segments.from_ids(ids)
    same(x, compiled(x, segments), run(gated_delta_rule_reference, x, segments=segments))


def test_torch_func_and_second_derivatives() -> None:
    x = draw(9)
    for op, times in ((gated_delta_rule_chunked, 9), (gated_delta_rule_chunked, 1)):
        cut = [z[:, :times] for z in x[:5]]
        f = lambda v, cut=cut, op=op: op(*cut[:2], v, *cut[3:])[0].square().sum()  # noqa: E731
        g = lambda v, cut=cut: gated_delta_rule_reference(*cut[:2], v, *cut[3:])[0].square().sum()  # noqa: E731
        torch.testing.assert_close(torch.func.grad(f)(cut[2].detach()), torch.func.grad(g)(cut[2].detach()))
    (first,) = torch.autograd.grad(run(gated_delta_rule_chunked, x)[0].square().sum(), x[2], create_graph=True)
    with pytest.raises(KernelError, match="no second derivatives"):
        torch.autograd.grad(first.sum(), x[2])


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_calls_and_memory_grow_with_chunks_only(decay: str) -> None:
    seen = {}
    for t in (512, 1024, 2048):
        x = narrow(draw(t, g=1, h=2, k=8, p=8, decay=decay, b=1))
        with Peak() as peak:
            grads(run(gated_delta_rule_chunked, x, chunk_size=64), x)
        with FlopCounterMode(display=False) as flops:
            run(gated_delta_rule_chunked, x, chunk_size=64)
        seen[t] = (peak.calls, peak.most, flops.get_total_flops())
    (calls, most, flops), (calls_2, most_2, flops_2), (calls_3, most_3, flops_3) = seen.values()
    assert calls_2 < 2 * 512
    assert calls_3 - calls_2 <= 2.2 * (calls_2 - calls) + 100
    assert most_3 < 4.2 * most
    assert (flops_2, flops_3) == (2 * flops, 4 * flops)
    assert most_3 - most_2 <= 2.2 * (most_2 - most) + 2**16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: (2, 7, 2, 4)}, "q must be"), ({1: (2, 7, 3, 5)}, "a multiple of 3 key heads"), ({2: (2, 6, 4, 3)}, "k must be"),
        ({3: (2, 7, 2)}, "beta must be"), ({4: (2, 7, 4, 3)}, "log_a must be"), ({5: (2, 4, 3, 5)}, "initial_state must be"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[int, tuple[int, ...]], message: str) -> None:
    x = draw(7)
    for i, shape in change.items():
        x[i] = torch.zeros(shape, dtype=torch.float64)
    for op in FORMS:
        with pytest.raises(ConfigError, match=f"gated_delta_rule: .*{message}"):
            run(op, x)
    with pytest.raises(ConfigError, match="chunk_size must be 1 or more"):
        run(FORMS[1], draw(7), chunk_size=0)
