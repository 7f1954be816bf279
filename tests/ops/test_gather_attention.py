"""Attention to chosen tokens against masks written query by query, the choice, and what both cost. Laws are the kit's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import ConfigError, Growing, KernelError, Segments
from hybridtf.ops.block_sparse_attention import Places, hold
from hybridtf.ops.gather_attention import (
    choose_tokens,
    chosen,
    gather_attention_reference,
    gather_attention_torch,
    index_scores,
)
from tests.ops.live_bytes import Peak

OPS = [gather_attention_reference, gather_attention_torch]
F64 = torch.float64
ROWS = ("1111110222222222222033", "0011111111111111111111", "2222222022222220333000", "1111111111110111111111")


def segments():
    return Segments.from_ids(torch.tensor([[int(c) for c in row] for row in ROWS]))


def draw(t, h=4, g=2, b=2, n=5, c=1, dtype=F64):
    shapes = ((b, t, h, 6), (b, t, g, 6), (b, t, g, 3))
    q, k, v = (torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes)
    return q, k, v, torch.rand(b, t, c, max(t, n)).argsort(-1)[..., :n]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("c", [1, 2])
def test_equals_torchs_attention_under_the_mask(op, c):
    q, k, v, index = draw(13, c=c)
    y, mass = op(q, k, v, index)
    mask = torch.zeros(2, c, 13, 13, dtype=torch.bool).scatter(-1, index.transpose(1, 2), True)
    mask = (mask & torch.ones(13, 13).tril().bool()).repeat_interleave(4 // c, 1)
    keys, values = (x.repeat_interleave(2, 2).transpose(1, 2) for x in (k, v))
    some = mask.any(-1).transpose(1, 2)[..., None]
    want = torch.where(some, F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, mask).transpose(1, 2), 0.0)
    torch.testing.assert_close(y, want, rtol=0, atol=1e-12)
    weight = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad((z * weight).sum(), (q, k, v), retain_graph=True) for z in (y, want))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.nan_to_num(), rtol=0, atol=1e-11)
    weights = (torch.einsum("bthk,bhsk->bhts", q, keys) * 6**-0.5).masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num()
    by_chooser = weights.unflatten(1, (c, -1)).sum(2).transpose(1, 2)
    torch.testing.assert_close(mass, by_chooser.gather(-1, index), rtol=0, atol=1e-12)
    assert not mass.requires_grad


def test_all_tokens_chosen_is_full_attention():
    q, k, v, _ = draw(17)
    index = torch.arange(17).expand(2, 17, 1, 17)
    keys, values = (x.repeat_interleave(2, 2).transpose(1, 2) for x in (k, v))
    want = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(gather_attention_torch(q, k, v, index)[0], want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("c", [1, 2])
def test_gradcheck_and_no_second_gradient(c):
    q, k, v, index = draw(5, b=1, n=3, c=c)
    assert torch.autograd.gradcheck(lambda *x: gather_attention_torch(*x, index)[0], (q, k, v))
    outside = torch.randn(1, 5, 4, dtype=F64, requires_grad=True)
    beside = lambda q, k, v, o: gather_attention_torch(q, k, v, index, outside=o)[::2]  # noqa: E731
    assert torch.autograd.gradcheck(beside, (q, k, v, outside))
    first = torch.autograd.grad(gather_attention_torch(q, k, v, index)[0].square().sum(), q, create_graph=True)[0]
    with pytest.raises(KernelError):
        first.sum().backward()


def test_small_parts_are_one_whole(monkeypatch):
    """Parts of the least size, and one part of all."""
    q, k, v, index = draw(50)
    weight = torch.randn(2, 50, 4, 3, dtype=F64)
    found = []
    for budget in (1, 2**30):
        monkeypatch.setattr("hybridtf.ops.gather_attention.gathered._BUDGET_CPU", budget)
        y = gather_attention_torch(q, k, v, index)[0]
        found.append([y, *torch.autograd.grad((y * weight).sum(), (q, k, v))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("c", [1, 2])
def test_what_lies_outside_makes_one_softmax(op, c):
    """Keys of two kinds, the first chosen and the others all seen: one softmax over both, by the sum over the others."""
    q, k, v, index = draw(13, c=c)
    others, values = (torch.randn(2, 13, 4, 5, n, dtype=F64, requires_grad=True) for n in (6, 3))
    scores = torch.einsum("bthk,bthjk->bthj", q, others) * 6**-0.5
    there = torch.einsum("bthj,bthjv->bthv", scores.softmax(-1), values)
    y, mass, share = op(q, k, v, index, outside=scores.logsumexp(-1))
    got = y + share[..., None] * there
    mask = torch.zeros(2, c, 13, 13, dtype=torch.bool).scatter(-1, index.transpose(1, 2), True)
    mask = (mask & torch.ones(13, 13).tril().bool()).repeat_interleave(4 // c, 1).transpose(1, 2)
    keys, held = (x.repeat_interleave(2, 2) for x in (k, v))
    near = (torch.einsum("bthk,bshk->bths", q, keys) * 6**-0.5).masked_fill(~mask, -torch.inf)
    weights = torch.cat([near, scores], -1).softmax(-1)
    want = torch.einsum("bths,bshv->bthv", weights[..., :13], held)
    want = want + torch.einsum("bthj,bthjv->bthv", weights[..., 13:], values)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(share, weights[..., 13:].sum(-1), rtol=0, atol=1e-12)
    shared = weights[..., :13].unflatten(2, (c, -1)).sum(3).gather(-1, index)
    torch.testing.assert_close(mass, shared, rtol=0, atol=1e-12)
    weight, given = torch.randn_like(got), (q, k, v, others, values)
    ours, theirs = (torch.autograd.grad((z * weight).sum(), given, retain_graph=True) for z in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("op", OPS)
def test_nothing_outside_is_as_without_and_nothing_inside_is_all_outside(op):
    q, k, v, index = (x.detach() for x in draw(9))
    y, mass, share = op(q, k, v, index, outside=torch.full((2, 9, 4), -torch.inf, dtype=F64))
    for a, b in zip((y, mass), op(q, k, v, index), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    assert not share.any()
    for none in (torch.full_like(index, -1), index[..., :0]):
        y, mass, share = op(q, k, v, none, outside=torch.randn(2, 9, 4, dtype=F64))
        assert not y.any()
        assert not mass.any()
        assert bool((share == 1).all())
    with pytest.raises(ConfigError, match="outside"):
        op(q, k, v, index, outside=torch.zeros(2, 9, 3))


@pytest.mark.parametrize("op", OPS)
def test_extreme_scores(op):
    q, k, v, index = draw(20, n=4)
    y = op(q.detach() * 1e150, k.detach() * 1e150, v.detach(), index)[0]
    assert bool(y.isfinite().all())
    wide = [x.detach() * 30 for x in (q, k)]
    narrow = op(*(x.float() for x in wide), v.detach().float(), index)[0]
    torch.testing.assert_close(narrow.double(), op(*wide, v.detach(), index)[0], rtol=1e-3, atol=1e-3)


def indexer(t, h=8, b=2, dtype=F64):
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((b, t, h, 4), (b, t, h), (b, t, 4))]


@pytest.mark.parametrize("budget", [1, 2**20])
@pytest.mark.parametrize("n", [1, 3, 40])
def test_the_choice_is_topk_of_the_scores_in_each_document(n, budget, monkeypatch):
    """Written token by token; and the scores of the choice, with their gradients."""
    monkeypatch.setattr("hybridtf.ops.gather_attention.choose._BUDGET_CPU", budget)
    given, docs = indexer(22, b=4), segments()
    q, w, k = (x.detach().masked_fill(~docs.real.view(4, 22, *[1] * (x.ndim - 2)), 0) for x in given)
    held = hold(None, {"k": k}, docs)
    found = choose_tokens(q, w, held.data["k"], held.places, n)
    for row, text in enumerate(ROWS):
        for i, name in enumerate(text):
            columns = [j for j in range(i + 1) if text[j] == name] if name != "0" else []
            terms = [[w[row, i, h] * (q[row, i, h] @ k[row, j]).relu() for h in range(8)] for j in columns]
            score = {at: sum(of) for at, of in enumerate(terms)}
            best = sorted(score, key=lambda at: (float(score[at]), at), reverse=True)[:n]
            assert sorted(x for x in found[row, i].tolist() if x >= 0) == sorted(best)
            scores = index_scores(q, w, held.data["k"], found, held.places)[row, i]
            want = [float(score.get(at, 0.0)) for at in found[row, i].tolist()]
            torch.testing.assert_close(scores, torch.tensor(want, dtype=F64), rtol=0, atol=1e-12)
            if i > 3 and row:
                break  # the scores need not be tried everywhere


def test_scores_have_gradients():
    q, w, k = indexer(6, h=3, b=1)
    places = Places.default(1, 6, 6, q.device)
    index = choose_tokens(q, w, k, places, 4)
    assert torch.autograd.gradcheck(lambda *x: index_scores(*x, index, places), (q, w, k))


def test_equal_scores_choose_the_latest():
    q, w, k = (x.detach() for x in indexer(9))
    places = Places.default(2, 9, 9, q.device)
    found = choose_tokens(q, torch.zeros_like(w), k, places, 3)
    assert found[0, 8].tolist() == [8, 7, 6]
    assert sorted(found[0, 1].tolist()) == [-1, 0, 1]
    k[:, 4] = q[:, 8, 0]
    w = torch.zeros_like(w)
    w[:, :, 0] = 1.0
    k[:, [0, 1, 2, 3, 5, 6, 7, 8]] = -q[:, 8:, 0]
    assert choose_tokens(q, w, k, places, 3)[0, 8].tolist() == [4, 8, 7]


def test_one_token_at_a_time_over_a_state_is_one_call():
    given = indexer(11)
    q, w, k = (x.detach() for x in given)
    asked, keys, values, _ = (x.detach() for x in draw(11))
    places = Places.default(2, 11, 11, q.device)
    index = choose_tokens(q, w, k, places, 4)
    whole = gather_attention_torch(asked, keys, values, index[:, :, None], places)[0]
    shapes = {"i": (4,), "k": (2, 6), "v": (2, 3)}
    leaf = Growing.empty(2, shapes, max_len=16, dtype=F64, device="cpu")
    with torch.no_grad():
        for i in range(11):
            now = slice(i, i + 1)
            held = hold(leaf, {"i": k[:, now], "k": keys[:, now], "v": values[:, now]}, None)
            leaf = held.leaf
            choice = choose_tokens(q[:, now], w[:, now], held.data["i"], held.places, 4)
            assert choice.sort(-1).values.tolist() == index[:, now].sort(-1).values.tolist()
            y = gather_attention_torch(asked[:, now], held.data["k"], held.data["v"], choice[:, :, None], held.places)[0]
            torch.testing.assert_close(y, whole[:, now], rtol=0, atol=1e-12)


def test_opcheck_and_compile():
    q, k, v, index = draw(12, dtype=torch.float32)
    iq, iw, ik = indexer(12, dtype=torch.float32)
    places = Places.default(2, 12, 12, q.device)
    slots = torch.where(index[:, :, 0] > torch.arange(12)[:, None], -1, index[:, :, 0])
    where = [x.clone() for x in vars(places).values()]
    for op, given in (
        (torch.ops.hybridtf.gather_attention.default, (q.detach(), k.detach(), v.detach(), slots, 0.5)),
        (torch.ops.hybridtf.index_scores.default, (iq.detach(), iw.detach(), ik.detach(), slots, 1.0)),
        (torch.ops.hybridtf.choose_tokens.default, (iq.detach(), iw.detach(), ik.detach(), *where, 3)),
    ):
        torch.library.opcheck(op, given, test_utils=("test_schema", "test_faketensor"))

    def both(q, k, v, iq, iw, ik):
        choice = choose_tokens(iq, iw, ik, places, 3)
        return gather_attention_torch(q, k, v, choice[:, :, None], places)[0], index_scores(iq, iw, ik, choice, places)

    given = (q, k, v, iq, iw, ik)
    for got, want in zip(torch.compile(both, backend="eager", fullgraph=True)(*given), both(*given), strict=True):
        torch.testing.assert_close(got, want)


def measure(t, n=32):
    """Peak bytes and calls of forward, backward and choice over ``t`` tokens."""
    q, k, v = (torch.randn(1, t, h, 16) for h in (4, 1, 1))
    slots = (torch.rand(1, t, n) * (torch.arange(t)[:, None] + 1)).long()
    form = chosen._attend_op.form
    with Peak() as forward:
        y = form.forward(q, k, v, slots, 0.25)[0]
    with Peak() as backward:
        form.backward(torch.ones_like(y), q, k, v, slots, 0.25)
    return forward.most, backward.most, forward.calls, backward.calls


def test_memory_and_calls_are_linear():
    small, large = measure(2048), measure(8192)
    for a, b in zip(small, large, strict=True):
        assert b < 4 * a * 1.1, (small, large)


def test_no_matrix_of_all_pairs_is_kept():
    """The choice over 4096 tokens: a matrix of all pairs would be 64 MiB, and one a head four times that."""
    from hybridtf.ops.gather_attention.choose import _choose_op

    q, w, k = (x.detach() for x in indexer(4096, h=4, b=1, dtype=torch.float32))
    places = Places.default(1, 4096, 4096, q.device)
    with Peak() as peak:
        _choose_op._init_fn(q, w, k, *vars(places).values(), 8)
    assert peak.most < 2**24


def test_misfits_are_refused():
    q, k, v, index = draw(5, b=1)
    places = Places.default(1, 5, 5, q.device)
    for bad in (index[:, :, 0], index.int(), index.expand(1, 5, 4, 5), index[:, :3]):
        with pytest.raises(ConfigError):
            gather_attention_torch(q, k, v, bad)
    with pytest.raises(ConfigError):
        gather_attention_torch(q, k[:, :, :, :3], v, index)
    with pytest.raises(ConfigError):
        gather_attention_torch(q, k, v, index, places, segments=Segments.from_mask(torch.ones(1, 5)))
    with pytest.raises(ConfigError):
        choose_tokens(q, q[..., 0], k, places, 2)
