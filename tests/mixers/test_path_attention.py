"""PaTH layers, with fla's reference in the middle of a layer of torch's own functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import Segments
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import PathAttentionConfig
from tests.mixers.plain_parts import built, causal_conv, given, same
from tests.peers import peer


@pytest.fixture(autouse=True)
def float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def layer(mixer, x):
    config, hd = mixer.config, mixer.head_dim
    q, k, v = (F.linear(x, p.weight).unflatten(-1, (-1, hd)) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    ways = (mixer.w_proj.down_proj, mixer.w_proj.up_proj) if config.w_rank else (mixer.w_proj,)
    w = x
    for part in ways:
        w = w @ part.weight.mT
    w = (causal_conv(w, mixer.conv) if config.d_conv else w).unflatten(-1, (-1, hd))
    w = w / (w.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    if config.qk_norm is not None:
        q, k = (F.rms_norm(z, (hd,), n.weight, config.qk_norm.eps) for z, n in ((q, mixer.q_norm), (k, mixer.k_norm)))
    beta = 2 * torch.sigmoid(F.linear(x, mixer.beta_proj.weight, mixer.beta_proj.bias))
    g = torch.zeros(*x.shape[:2], mixer.n_heads)
    if config.forget_gate:
        g = F.logsigmoid(F.linear(x, mixer.f_proj.weight, mixer.f_proj.bias))
    with StrictFloat64():
        y = peer("fla/ops/path_attn/naive.py").naive_path_attn(q, k, v, w, beta, g * hd**0.5, hd**-0.5, chunk_size=4)
    return y.flatten(2) @ mixer.out_proj.weight.mT


OPTIONS = [
    {}, {"forget_gate": True, "qk_norm": {"type": "rms_norm", "eps": 1e-5}}, {"w_rank": 0, "d_conv": 0},
    {"forget_gate": True, "d_conv": 1},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_layer(options):
    mixer = built(PathAttentionConfig(n_heads=4, n_kv_heads=2, head_dim=3, **{"w_rank": 5, **options}), 7)
    x = given(2, 11, 7)
    same(mixer(x)[0], layer(mixer, x), x, mixer)


def test_a_packed_document_is_as_alone():
    mixer = built(PathAttentionConfig(n_heads=2, head_dim=4, w_rank=5, forget_gate=True), 6)
    x = given(1, 9, 6)
    y = mixer(x, segments=Segments.from_ids(torch.tensor([[1, 1, 1, 0, 2, 2, 0, 2, 2]])))[0]
    at = [4, 5, 7, 8]
    torch.testing.assert_close(y[:, at], layer(mixer, x[:, at]), rtol=0, atol=1e-11)
