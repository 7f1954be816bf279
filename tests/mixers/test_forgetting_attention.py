"""Forgetting attention against fla's naive reference, and its layer written out with torch's own functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import Segments
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import ForgettingAttentionConfig
from hybridtf.ops.attention import AttentionMask, attention_reference, attention_torch
from tests.mixers.plain_parts import built, given, same, shifted
from tests.peers import peer

PRO = {"qk_norm": True, "output_norm": True, "output_gate": True, "kv_shift": True}


def naive(q, k, v, log_f, window=None):
    """fla's reference casts to float32: what it computes in is left alone by giving it float64 for that."""
    module = peer("fla/ops/forgetting_attn/naive.py")
    with StrictFloat64():
        return module.naive_forgetting_attn(q, k, v, log_f, window_size=window)


@pytest.mark.parametrize(("t", "h", "g", "window"), [(1, 2, 2, None), (7, 4, 2, None), (13, 3, 1, None), (13, 4, 2, 4)])
def test_the_op_equals_fla_forward_and_gradients(t, h, g, window):
    gen = torch.Generator().manual_seed(t)
    q, k, v = (torch.randn(2, t, n, 5, generator=gen, dtype=torch.float64).requires_grad_() for n in (h, g, g))
    logits = torch.randn(2, t, h, generator=gen, dtype=torch.float64).requires_grad_()
    want = naive(q, k, v, F.logsigmoid(logits), window)
    weight = torch.randn(want.shape, generator=gen, dtype=torch.float64)
    theirs = torch.autograd.grad((want * weight).sum(), (q, k, v, logits))
    for fn in (attention_reference, attention_torch):
        c = F.logsigmoid(logits).cumsum(1)
        got = fn(q, k, v, AttentionMask(window=window, q_decay=c, k_decay=c))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
        found = torch.autograd.grad((got * weight).sum(), (q, k, v, logits))
        for a, b in zip(found, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("t", [1, 63, 300])
def test_gradients_of_the_gates_are_not_those_of_rounding_when_the_output_is_in_bfloat16(t):
    """A gate's gradient is the difference of sums over rows and columns, which cancel but for what it is."""
    gen = torch.Generator().manual_seed(t)
    q, k, v, weight = (torch.randn(2, t, 4, 8, generator=gen).bfloat16() for _ in range(4))
    logits = torch.randn(2, t, 4, generator=gen) + 3

    def gradients(fn, dtype, wide):
        c = (leaf := logits.to(wide).requires_grad_()).sigmoid().log().cumsum(1)
        decays = [c.clone(), c.clone()]
        out = fn(*(x.to(dtype) for x in (q, k, v)), AttentionMask(q_decay=decays[0], k_decay=decays[1]))
        return torch.autograd.grad((out * weight.to(dtype)).sum(), (leaf, decays[0]))

    got = gradients(attention_torch, torch.bfloat16, torch.float32)
    want = gradients(attention_reference, torch.float64, torch.float64)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=2e-5)


def layer(mixer, x):
    """The whole layer, with fla's reference in the middle."""
    h, g, config = mixer.n_heads, mixer.n_kv_heads, mixer.config
    q, k, v = x @ mixer.q_proj.weight.mT, x @ mixer.k_proj.weight.mT, x @ mixer.v_proj.weight.mT
    q, k, v = (z.unflatten(-1, (n, -1)) for z, n in ((q, h), (k, g), (v, g)))
    if config.kv_shift:
        a, b = (torch.sigmoid(x @ p.weight.mT)[..., None] for p in (mixer.k_shift_proj, mixer.v_shift_proj))
        k, v = (s * shifted(z.flatten(2)).view_as(z) + (1 - s) * z for s, z in ((a, k), (b, v)))

    def normed(z, norm):
        return F.rms_norm(z, z.shape[-1:], eps=1e-6) * norm.weight.view(z.shape[-2:])

    if config.qk_norm:
        q, k = normed(q, mixer.q_norm), normed(k, mixer.k_norm)
    o = naive(q, k, v, F.logsigmoid(F.linear(x, mixer.f_proj.weight, mixer.f_proj.bias)))
    o = (normed(o, mixer.out_norm) if config.output_norm else o).flatten(2)
    return (o * torch.sigmoid(x @ mixer.gate_proj.weight.mT) if config.output_gate else o) @ mixer.out_proj.weight.mT


@pytest.mark.parametrize(("h", "g", "options"), [(3, 3, {}), (4, 2, {"output_gate": True}), (4, 2, PRO), (3, 3, PRO)])
def test_the_layer(h, g, options):
    mixer = built(ForgettingAttentionConfig(n_heads=h, n_kv_heads=g, head_dim=4, **options), 7)
    x = given(2, 11, 7)
    same(mixer(x)[0], layer(mixer, x), x, mixer)


def test_documents_start_without_the_sums_of_others():
    mixer = built(ForgettingAttentionConfig(n_heads=2, head_dim=4, **PRO), 6)
    x = given(1, 12, 6)
    y = mixer(x, segments=Segments.from_ids(torch.tensor([[0, 1, 1, 0, 1, 2, 2, 2, 2, 0, 2, 2]])))[0]
    torch.testing.assert_close(y[:, [5, 6, 7, 8, 10, 11]], layer(mixer, x[:, [5, 6, 7, 8, 10, 11]]), rtol=0, atol=1e-12)


def test_sums_of_a_long_document_keep_their_digits_in_float32():
    mixer = built(ForgettingAttentionConfig(n_heads=2, head_dim=4), 6)
    x = torch.randn(1, 6000, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        mixer.f_proj.weight.mul_(0.1)
        mixer.f_proj.bias.copy_(torch.tensor([-60.0, 8.0]))  # sums of -360000 and of about -2
        want = mixer(x)[0]
        got, state = mixer.float()(x[:, :5990].float(), state=mixer.init_state(1))
        torch.testing.assert_close(got, want[:, :5990].float(), rtol=0, atol=2e-5)
        last, state = mixer(x[:, 5990:].float(), state=state)
    torch.testing.assert_close(last, want[:, 5990:].float(), rtol=0, atol=2e-5)
    assert state["held"]["decay"].dtype == torch.float64
