"""Talking heads: the op against plain loops, its memory, and the mixer with mixes that mix nothing."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, RecipeError
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import AttentionConfig, TalkingHeadsConfig
from hybridtf.ops.attention import AttentionMask
from hybridtf.ops.talking_attention import talking_attention_chunked, talking_attention_reference
from tests.mixers.plain_parts import built, given, same
from tests.ops.live_bytes import Peak
from tests.peers import peer

D = 12


def draw(b=2, t=7, s=9, h=4, g=2, k=3, v=5, dtype=torch.float64):
    def leaf(*shape):
        return torch.randn(*shape, dtype=dtype, requires_grad=True)

    return leaf(b, t, h, k), leaf(b, s, g, k), leaf(b, s, g, v), leaf(h, h), leaf(h, h)


def by_loops(q, k, v, p, w, sees):
    """One pair of tokens and one pair of heads at a time; ``sees(b, t, s)``."""
    b, t, h, _ = q.shape
    r = h // k.shape[2]
    out = torch.zeros(b, t, h, v.shape[3], dtype=q.dtype)
    for row in range(b):
        for i in range(t):
            keys = [j for j in range(k.shape[1]) if sees(row, i, j)]
            if not keys:
                continue
            raw = torch.stack([torch.stack([q[row, i, a] @ k[row, j, a // r] for j in keys]) for a in range(h)])
            soft = [sum(p[a, c] * raw[a] for a in range(h)).div(q.shape[3] ** 0.5).softmax(0) for c in range(h)]
            for c in range(h):
                weights = sum(w[a, c] * soft[a] for a in range(h))
                out[row, i, c] = sum(weights[n] * v[row, j, c // r] for n, j in enumerate(keys))
    return out


def masks(b, t, s):
    ids = torch.tensor([[0, 1, 1, 2, 2, 0, 3], [1, 1, 1, 1, 2, 2, 2]])
    k_ids = torch.tensor([[1, 1, 0, 1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 1, 2, 2, 2]])
    pos = torch.arange(s - t, s).expand(b, -1)
    yield AttentionMask(), lambda _, i, j: j <= i + s - t
    yield AttentionMask(causal=False), lambda *_: True
    yield AttentionMask(q_ids=ids, k_ids=k_ids, q_pos=pos, k_pos=torch.arange(s).expand(b, -1)), (
        lambda row, i, j: j <= i + s - t and ids[row, i] == k_ids[row, j] and bool(ids[row, i] > 0)
    )


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("chunk_size", [None, 1, 3, 7])
def test_equals_plain_loops_forward_and_gradients(which, chunk_size):
    given = draw()
    mask, sees = list(masks(2, 7, 9))[which]
    want = by_loops(*given, sees)
    weight = torch.randn_like(want)
    theirs = torch.autograd.grad((want * weight).sum(), given)
    q, k, v, p, w = given
    for got in (
        talking_attention_reference(q, k, v, mask, p, w), talking_attention_chunked(q, k, v, mask, p, w, chunk_size=chunk_size)
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
        for a, b in zip(torch.autograd.grad((got * weight).sum(), given), theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_memory_is_linear_in_length_and_calls_grow_with_chunks():
    def used(t):
        q, k, v, p, w = draw(b=1, t=t, s=t, h=2, g=1, k=4, v=4, dtype=torch.float32)
        with Peak() as peak:
            talking_attention_chunked(q, k, v, AttentionMask(), p, w, chunk_size=64).sum().backward()
        return peak.most, peak.calls

    (few, few_calls), (many, many_calls) = used(1024), used(4096)
    assert many < 5 * few
    assert many < 4096 * 4096 * 4  # one head's scores
    assert few_calls < many_calls < 4.5 * few_calls


def test_with_heads_that_say_nothing_to_each_other_it_is_attention():
    ctx = BuildContext(d_model=D, param_dtype=torch.float64)
    plain = AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=3, position={"type": "none"})
    mixer = TalkingHeadsConfig(n_heads=4, n_kv_heads=2, head_dim=3, position={"type": "none"}).build(ctx)
    with torch.no_grad():
        mixer.score_mix.copy_(torch.eye(4))
        mixer.weight_mix.copy_(torch.eye(4))
    twin = plain.build(ctx)
    twin.load_state_dict({n: p for n, p in mixer.state_dict().items() if "mix" not in n})
    x = torch.randn(2, 9, D, dtype=torch.float64)
    torch.testing.assert_close(mixer(x)[0], twin(x)[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("t", [2, 17])
def test_the_layer_is_that_of_x_transformers(t, kv_heads):
    config = TalkingHeadsConfig(n_heads=4, n_kv_heads=kv_heads, head_dim=3, position={"type": "none"})
    mixer, x = built(config, D), given(2, t, D)
    attention = peer("x_transformers.x_transformers").Attention
    theirs = attention(D, dim_head=3, heads=4, kv_heads=kv_heads, causal=True, talking_heads=True)
    weights = {
        "to_q.weight": mixer.q_proj.weight, "to_k.weight": mixer.k_proj.weight, "to_v.weight": mixer.v_proj.weight,
        "to_out.weight": mixer.out_proj.weight,
        "attend.pre_softmax_talking_heads.weight": mixer.score_mix.T[..., None, None],
        "attend.post_softmax_talking_heads.weight": mixer.weight_mix.T[..., None, None],
    }
    with StrictFloat64():
        want = torch.func.functional_call(theirs, weights, x)
    same(mixer(x)[0], want, x, mixer)


def test_refusals():
    q, k, v, p, w = draw()
    with pytest.raises(ConfigError, match=r"score_mix must have shape \(4, 4\); got \(3, 4\)"):
        talking_attention_chunked(q, k, v, AttentionMask(), p[:3], w)
    with pytest.raises(ConfigError, match="heads that mix their scores have no softcap"):
        talking_attention_reference(q, k, v, AttentionMask(softcap=2.0), p, w)
    with pytest.raises(RecipeError, match="are those of 'attention'"):
        TalkingHeadsConfig(n_heads=2, mix_scores=False, mix_weights=False)
