"""Stick-breaking attention: the definition against fla's, and the chunked form against the definition."""

from __future__ import annotations

import random

import pytest
import torch

from hybridtf.core import ConfigError
from hybridtf.ops.attention import AttentionMask
from hybridtf.ops.stick_breaking import stick_breaking_chunked, stick_breaking_reference
from tests.ops.attention_cases import packed_ids, positions_of, tensors
from tests.peers import peer

FORMS = (stick_breaking_reference, stick_breaking_chunked)


def results(fn, case, mask, **options):
    """y, what is left, and the gradients of both."""
    y, left = fn(case.q, case.k, case.v, mask, **options)
    gen = torch.Generator().manual_seed(3)
    total = sum((x * torch.randn(x.shape, generator=gen, dtype=torch.float64)).sum() for x in (y, left))
    grads = torch.autograd.grad(total, (case.q, case.k, case.v), allow_unused=True, materialize_grads=True)
    return [y.detach(), left.detach(), *grads]


def close(got, want, atol=1e-12):
    for name, a, b in zip(("y", "left", "dq", "dk", "dv"), got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("attend_current", [False, True])
@pytest.mark.parametrize(("t", "h", "g"), [(1, 1, 1), (9, 4, 2), (13, 3, 1)])
def test_both_forms_equal_fla_forward_and_gradients(t, h, g, attend_current):
    case = tensors(2, t, t, h, g, 5, 3, seed=t)
    naive = peer("fla/ops/stickbreaking_attn/naive.py").naive_stickbreaking_attn

    def theirs(q, k, v, mask, **options):
        return naive(q, k, v, **options)

    want = results(theirs, case, None, attend_current=attend_current)
    for fn in FORMS:
        close(results(fn, case, AttentionMask(), attend_current=attend_current), want)


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("kind", ["packed", "buffer", "last", "window"])
def test_the_chunked_form_equals_the_definition(kind, seed):
    rng = random.Random(seed)
    b, t, s = rng.randint(1, 3), rng.choice([1, 3, 8, 13]), rng.choice([13, 17])
    case, mask = tensors(b, t, s, 4, 2, 3, 5, seed=seed), AttentionMask(window=4 if kind == "window" else None)
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
    options = {"attend_current": seed % 2 == 0, "scale": 0.7}
    want = results(stick_breaking_reference, case, mask, **options)
    for chunk in (1, 3, 8, None):
        close(results(stick_breaking_chunked, case, mask, chunk_size=chunk, **options), want)


@pytest.mark.parametrize("fn", FORMS)
def test_the_first_token_sees_nothing_and_keeps_its_stick(fn):
    case = tensors(1, 4, 4, 2, 1, 3, 3)
    y, left = fn(case.q, case.k, case.v, AttentionMask())
    assert not y[:, 0].any()
    assert bool((left[:, 0] == 1).all())


@pytest.mark.parametrize("size", [30.0, 3000.0])
def test_extreme_scores_have_no_nan_and_shares_of_at_most_one(size):
    case = tensors(1, 40, 40, 2, 1, 4, 4)
    with torch.no_grad():
        case.q.mul_(size)
    got = results(stick_breaking_chunked, case, AttentionMask(), chunk_size=7)
    want = results(stick_breaking_reference, case, AttentionMask())
    assert all(bool(x.isfinite().all()) for x in got)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * size)
    assert float(got[1].min()) >= 0
    assert float(got[1].max()) <= 1


def test_hidden_keys_may_hold_what_overflows():
    case = tensors(1, 3, 5, 2, 1, 4, 4)
    ids = torch.tensor([[1, 0, 1, 1, 1]])
    mask = AttentionMask(q_ids=ids[:, 2:], k_ids=ids, q_pos=torch.tensor([[1, 2, 3]]), k_pos=torch.tensor([[0, 9, 1, 2, 3]]))
    clean = results(stick_breaking_chunked, case, mask)
    with torch.no_grad():
        case.k[:, 1] = 1e308
    close(results(stick_breaking_chunked, case, mask), clean)


def test_near_keys_of_a_long_row_keep_their_digits_in_float32():
    case = tensors(1, 1, 20000, 1, 1, 4, 4)
    with torch.no_grad():
        case.q.mul_(4)
        case.k[:, -50:].mul_(0.2)
        want, _ = stick_breaking_chunked(case.q, case.k, case.v, AttentionMask())
        got, _ = stick_breaking_chunked(case.q.float(), case.k.float(), case.v.float(), AttentionMask())
    torch.testing.assert_close(got, want.float(), rtol=0, atol=2e-6)


def test_gradients_numerically():
    case = tensors(1, 5, 6, 2, 1, 3, 2)
    given = (case.q, case.k, case.v)
    assert torch.autograd.gradcheck(lambda *x: stick_breaking_chunked(*x, AttentionMask(), chunk_size=2), given, fast_mode=True)


def test_compiles_into_one_graph():
    case = tensors(2, 9, 9, 4, 2, 3, 3)
    compiled = torch.compile(
        lambda q, k, v: stick_breaking_chunked(q, k, v, AttentionMask(), chunk_size=4), fullgraph=True, backend="eager"
    )
    want = stick_breaking_reference(case.q, case.k, case.v, AttentionMask())
    for a, b in zip(compiled(case.q, case.k, case.v), want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    torch._dynamo.reset()


def test_masks_that_it_has_no_word_for_are_refused():
    case = tensors(1, 3, 3, 2, 1, 4, 4)
    for mask, word in (
        (AttentionMask(softcap=1.0), "softcap"), (AttentionMask(causal=False), "causal"),
        (AttentionMask(prefix_len=torch.ones(1, 3).long()), "prefix"),
    ):
        for fn in FORMS:
            with pytest.raises(ConfigError, match=word):
                fn(case.q, case.k, case.v, mask)
