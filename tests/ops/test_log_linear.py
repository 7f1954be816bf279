"""``log_linear`` against other people's code, at the ends of its range, and under a compiler. Its laws are the kit's."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core.errors import ConfigError
from hybridtf.ops.log_linear import chunked, log_linear_chunked, log_linear_reference
from hybridtf.ops.log_linear.levels import level
from tests.ops.live_bytes import Peak
from tests.ops.operators import arguments, check_operators
from tests.peers import peer

F64 = torch.float64
OPS = [log_linear_reference, log_linear_chunked]


def draw(t, levels=8, g=2, h=4, n=3, p=5, decay=0.3, dtype=F64, b=2, seed=0):
    gen = torch.Generator().manual_seed(seed)
    shapes = ((b, t, g, n), (b, t, g, n), (b, t, h, p), (b, t, h), (b, t, h, levels))
    q, k, v, log_a, scales = (torch.randn(*shape, generator=gen, dtype=F64).to(dtype) for shape in shapes)
    return [x.requires_grad_() for x in (q, k, v, -decay * log_a.abs(), scales)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("t", "levels"), [(1, 2), (2, 2), (5, 4), (13, 5), (32, 6), (37, 9)])
def test_equals_the_reference_of_others(op, t, levels):
    """fla's matrix over all pairs, built level by level; outputs and gradients."""
    naive = peer("fla/ops/log_linear_attn/naive.py").naive_log_linear_attn
    given = draw(t, levels)
    got, want = op(*given, chunk_size=5)[0], naive(*given)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    weight = torch.randn_like(got)
    ours, theirs = (torch.autograd.grad((y * weight).sum(), given) for y in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_levels_are_the_bits_of_the_papers_tree():
    """Block l of token t: the 2^(l-1) tokens that end where the bits of t below l - 1 are cleared, if bit l - 1 is set."""
    for t in range(70):
        want = {t: 0}
        for bit in range(7):
            if t >> bit & 1:
                end = t >> bit << bit
                want.update(dict.fromkeys(range(end - (1 << bit), end), bit + 1))
        found = level(torch.tensor(t), torch.arange(t + 1), 20).tolist()
        assert found == [want[j] for j in range(t + 1)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("levels", [2, 3, 4])
def test_the_last_level_holds_all_that_is_older(op, levels):
    """Every pair written out, with the level bounded."""
    given = draw(21, levels, g=4)
    q, k, v, log_a, scales = given
    i = torch.arange(21)
    on = level(i[:, None], i, levels)
    steps = log_a.cumsum(1).transpose(1, 2)
    weights = (steps[..., :, None] - steps[..., None, :]).tril().exp().tril()
    weights = weights * scales.transpose(1, 2).gather(-1, on.expand(2, 4, 21, 21)) * torch.einsum("bihn,bjhn->bhij", q, k)
    y = op(*given, chunk_size=4)[0]
    torch.testing.assert_close(y, torch.einsum("bhij,bjhp->bihp", weights, v), rtol=1e-10, atol=1e-10)


def test_equal_scales_make_it_plain_linear_attention_with_decay():
    from hybridtf.ops.ssd import ssd_reference

    q, k, v, log_a, scales = draw(23)
    y = log_linear_chunked(q, k, v, log_a, torch.ones_like(scales), chunk_size=4)[0]
    torch.testing.assert_close(y, ssd_reference(q, k, v, log_a)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_those_of_differences(op):
    q, k, v, log_a, scales = draw(6, 4, g=1, h=1, n=2, p=1, b=1)
    S = torch.randn(1, 3, 1, 2, 1, dtype=F64, requires_grad=True)

    def run(*x):
        y, (last, _) = op(*x[:5], initial_state=(x[5], torch.tensor([5])), chunk_size=4)
        return y, last

    assert torch.autograd.gradcheck(run, (q, k, v, log_a, scales, S))


@pytest.mark.parametrize("decay", [1e-4, 1.0, 1e4, float("inf")])
def test_float32_stays_finite_and_near_float64(decay):
    wide = [x.detach() for x in draw(600, 11, decay=min(decay, 1e30))]
    if decay == float("inf"):
        resets = torch.rand(wide[3].shape, generator=torch.Generator().manual_seed(1)) < 0.3
        wide[3] = torch.where(resets, -torch.inf, -0.1).double()
    narrow = [x.float().requires_grad_() for x in wide]
    want, (S, _) = log_linear_reference(*wide)
    y, (last, count) = log_linear_chunked(*narrow)
    assert count.tolist() == [600, 600]
    for a, b in ((y, want), (last, S)):
        assert float((a.detach().double() - b).norm() / b.norm()) < 1e-5
    for grad in torch.autograd.grad(y.square().mean(), narrow):
        assert grad.isfinite().all()


@torch.no_grad()
def test_calls_grow_with_chunks_and_memory_with_the_levels():
    found = {}
    for t, size in ((128, 16), (256, 32), (256, 16)):
        given = [x.detach() for x in draw(t, 9, n=2, p=2)]
        S = torch.zeros(2, 8, 4, 2, 2, dtype=F64)
        call = chunked.Call(
            dict(zip(("q", "k", "v", "log_a", "level_scales"), given, strict=True))
            | {"count": torch.arange(1, t + 1, dtype=F64).expand(2, t)},
            {}, {"chunk_size": size}, None,
        )
        state = (S, torch.zeros(2, dtype=F64))
        with Peak() as calls:
            for start in range(0, t, size):
                state = chunked._span(call.cut(start, start + size), state)[1]
        found[t, size] = calls.calls
    assert found[128, 16] == found[256, 32]
    assert found[256, 16] == 2 * found[128, 16]


def test_operators_are_whole():
    timed = [*(x.detach() for x in draw(9, 4)), torch.arange(1, 10, dtype=F64).expand(2, 9).contiguous()]
    states = [torch.randn(2, 3, 4, 3, 5, dtype=F64), torch.zeros(2, dtype=F64)]
    check_operators(chunked._chunked, arguments(timed, None, (4,)), states)


def test_compiled_equals_eager():
    compiled = torch.compile(log_linear_chunked, fullgraph=True, backend="aot_eager", dynamic=True)
    for t in (9, 14):
        given = draw(t)
        y, (S, count) = compiled(*given, chunk_size=4)
        want, (S2, count2) = log_linear_chunked(*given, chunk_size=4)
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(S, S2)
        assert torch.equal(count, count2)
        ours, theirs = (torch.autograd.grad(z.sum(), given) for z in (y, want))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("op", OPS)
def test_what_does_not_fit_is_refused(op):
    q, k, v, log_a, scales = draw(4)
    for change, message in (
        ((q, k[:, :3], v, log_a, scales), r"k must be \(b t g n\) and v"),
        ((q[..., :1], k, v, log_a, scales), "q must have"),
        ((q, k, v[:, :, :3], log_a, scales), "must be a multiple of the 2 groups"),
        ((q, k, v, log_a[..., :1], scales), "log_a must be"),
        ((q, k, v, log_a, scales[..., :1]), "2 to 24 levels"),
    ):
        with pytest.raises(ConfigError, match=message):
            op(*change)
    with pytest.raises(ConfigError, match="initial_state must be"):
        op(q, k, v, log_a, scales, initial_state=(torch.zeros(2, 8, 4, 3, 5), torch.zeros(2, dtype=torch.int64)))
    with pytest.raises(ConfigError, match="chunk_size must be 1 or more"):
        op(q, k, v, log_a, scales, chunk_size=0)
