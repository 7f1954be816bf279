"""PaTH attention: the definition against fla's and against matrices multiplied out; the chunked form against the definition."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import ConfigError
from hybridtf.interop.strict import StrictFloat64
from hybridtf.ops.attention import AttentionMask
from hybridtf.ops.path_attention import path_attention_chunked, path_attention_reference
from tests.ops.attention_cases import packed_ids, positions_of
from tests.ops.live_bytes import Peak
from tests.peers import peer


def drawn(b, t, s, h, g, k, v, seed=0):
    """q, k, v, w of length 1, beta in (0, 2)."""
    gen = torch.Generator().manual_seed(seed)
    shapes = ((b, t, h, k), (b, s, g, k), (b, s, g, v), (b, s, g, k), (b, s, g))
    q, keys, values, w, beta = (torch.randn(shape, generator=gen, dtype=torch.float64) for shape in shapes)
    return [x.requires_grad_() for x in (q, keys, values, F.normalize(w, dim=-1), 2 * torch.sigmoid(2 * beta))]


def results(fn, given, mask, extra=(), **options):
    y = fn(*given, mask, **options)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), (*given, *extra), allow_unused=True, materialize_grads=True)]


def close(got, want, atol=1e-11):
    for name, a, b in zip(("y", "dq", "dk", "dv", "dw", "dbeta", "dc"), got, want, strict=False):
        torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.fixture
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize(("t", "h", "g", "chunk"), [(1, 2, 2, 4), (7, 4, 2, 4), (13, 3, 1, 4), (16, 2, 2, 8)])
def test_both_forms_equal_fla_forward_and_gradients(t, h, g, chunk, float64):
    """fla multiplies log gates by the scale as well: it is given gates that this leaves right."""
    given, scale = drawn(2, t, t, h, g, 5, 5, seed=t), 0.6
    logits = torch.randn(2, t, h, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    naive = peer("fla/ops/path_attn/naive.py").naive_path_attn
    with StrictFloat64():
        want = results(
            lambda *x: naive(*x[:5], F.logsigmoid(logits) / scale, scale, chunk_size=chunk), given, None, (logits,)
        )
    for fn in (path_attention_reference, path_attention_chunked):
        c = F.logsigmoid(logits).cumsum(1)
        close(results(fn, given, AttentionMask(q_decay=c, k_decay=c), (logits,), scale=scale), want)


def test_the_definition_is_the_product_of_matrices():
    q, k, v, w, beta = (x.detach() for x in drawn(1, 6, 6, 1, 1, 4, 3))
    scores = torch.full((6, 6), -torch.inf, dtype=torch.float64)
    for i in range(6):
        for j in range(i + 1):
            product = torch.eye(4, dtype=torch.float64)
            for m in range(i, j, -1):
                product = product @ (torch.eye(4).double() - beta[0, m, 0] * torch.outer(w[0, m, 0], w[0, m, 0]))
            scores[i, j] = q[0, i, 0] @ product @ k[0, j, 0] / 2
    want = scores.softmax(-1) @ v[0, :, 0]
    torch.testing.assert_close(path_attention_reference(q, k, v, w, beta, AttentionMask())[0, :, 0], want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["packed", "buffer", "last"])
def test_the_chunked_form_equals_the_definition(kind, seed):
    rng = random.Random(seed)
    b, t, s = rng.randint(1, 3), rng.choice([1, 3, 8, 13]), rng.choice([13, 17])
    given, mask = drawn(b, t, s, 4, 2, 3, 5, seed=seed), AttentionMask()
    if kind == "packed":
        ids = packed_ids(rng, b, s)
        pos = positions_of(ids)
        mask = AttentionMask(q_ids=ids[:, s - t :], k_ids=ids, q_pos=pos[:, s - t :], k_pos=pos)
    if kind == "buffer":
        length = torch.tensor([rng.randint(0, s) for _ in range(b)])[:, None]
        mask = AttentionMask(
            q_ids=torch.ones(b, t).long(), k_ids=(torch.arange(s) < length).long(), q_pos=length - t + torch.arange(t),
            k_pos=torch.arange(s).expand(b, -1),
        )
    want = results(path_attention_reference, given, mask, scale=0.7)
    for query_chunk, key_chunk in ((1, 3), (3, 4), (8, 1), (None, 64)):
        options = {"query_chunk": query_chunk, "key_chunk": key_chunk, "scale": 0.7}
        close(results(path_attention_chunked, given, mask, **options), want)


def test_documents_in_a_row_are_as_alone():
    given = drawn(1, 11, 11, 4, 2, 3, 5)
    ids = torch.tensor([[1, 1, 1, 0, 1, 2, 2, 0, 2, 2, 3]])
    mask = AttentionMask(q_ids=ids, k_ids=ids, q_pos=positions_of(ids), k_pos=positions_of(ids))
    y = path_attention_chunked(*given, mask, query_chunk=4, key_chunk=4)
    for document in (1, 2, 3):
        at = (ids[0] == document).nonzero()[:, 0]
        alone = path_attention_reference(*(x[:, at] for x in given), AttentionMask())
        torch.testing.assert_close(y[:, at], alone, rtol=0, atol=1e-12)


def test_many_reflections_stay_bounded_and_right_in_float32():
    """beta of nearly 2 and axes that repeat: the hardest chunks to put together."""
    given = [x.detach() for x in drawn(1, 2000, 2000, 2, 1, 8, 8)]
    gen = torch.Generator().manual_seed(5)
    base = torch.randn(1, 1, 1, 8, generator=gen, dtype=torch.float64)
    noise = torch.randn(1, 2000, 1, 8, generator=gen, dtype=torch.float64)
    given[3] = F.normalize(base + 0.05 * noise, dim=-1)
    given[4] = torch.full_like(given[4], 1.99)
    want = path_attention_chunked(*given, AttentionMask())
    got = path_attention_chunked(*(x.float() for x in given), AttentionMask())
    torch.testing.assert_close(got, want.float(), rtol=0, atol=1e-4)


def test_memory_of_training_is_linear_in_length():
    def peak(t):
        given = [x.detach().float().requires_grad_() for x in drawn(1, t, t, 2, 1, 8, 8)]
        with Peak() as meter:
            path_attention_chunked(*given, AttentionMask(), query_chunk=32).sum().backward()
        return meter.most

    assert peak(1024) < 2.3 * peak(512)


def test_gradients_numerically():
    given = drawn(1, 5, 6, 2, 1, 3, 2)
    assert torch.autograd.gradcheck(
        lambda *x: path_attention_chunked(*x, AttentionMask(), query_chunk=2, key_chunk=4), given, fast_mode=True
    )


def test_compiles_into_one_graph():
    given = drawn(2, 9, 9, 4, 2, 3, 3)
    compiled = torch.compile(
        lambda *x: path_attention_chunked(*x, AttentionMask(), query_chunk=4, key_chunk=4), fullgraph=True, backend="eager"
    )
    want = path_attention_reference(*given, AttentionMask())
    torch.testing.assert_close(compiled(*given), want, rtol=0, atol=1e-12)
    torch._dynamo.reset()


def test_calls_that_do_not_fit_are_refused():
    given = drawn(1, 3, 3, 2, 1, 4, 4)
    for mask, word in ((AttentionMask(softcap=1.0), "softcap"), (AttentionMask(causal=False), "causal")):
        for fn in (path_attention_reference, path_attention_chunked):
            with pytest.raises(ConfigError, match=word):
                fn(*given, mask)
    with pytest.raises(ConfigError, match="beta"):
        path_attention_reference(*given[:4], given[4][:, :2], AttentionMask())
