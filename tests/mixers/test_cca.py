"""Compressed convolutional attention against transformers' layer of ZAYA1, forward and every gradient."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, Segments
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import CCAConfig

D, T = 10, 9
zaya = pytest.importorskip("transformers.models.zaya.modeling_zaya")
NAMES = {
    "qkv_proj.q_proj": "q_proj", "qkv_proj.k_proj": "k_proj", "qkv_proj.v_proj_current": "v_proj_current",
    "qkv_proj.v_proj_delayed": "v_proj_delayed", "qkv_proj.conv_qk_depthwise.weight": "conv.weight",
    "qkv_proj.conv_qk_depthwise.bias": "conv_bias", "qkv_proj.conv_qk_grouped": "conv_head", "qk_norm": "",
    "o_proj": "out_proj",
}


def renamed(name):
    for theirs, ours in NAMES.items():
        if name.startswith(theirs):
            return (ours + name.removeprefix(theirs)).lstrip(".")
    raise KeyError(name)


def pair(h, g, hd, d_conv, d_conv_head):
    config = zaya.ZayaConfig(
        hidden_size=D, num_attention_heads=h, num_key_value_heads=g, head_dim=hd, num_hidden_layers=1, cca_time0=d_conv,
        cca_time1=d_conv_head, layer_types=["hybrid"],
    )
    config._attn_implementation = "sdpa"
    layer = zaya.ZayaAttention(config, 0).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) * 0.5)
    with StrictFloat64():
        table = zaya.ZayaRotaryEmbedding(config)(torch.zeros(1, T, D).double(), torch.arange(T)[None], "hybrid")
    theta = config.rope_parameters["hybrid"]["rope_theta"]
    mixer = CCAConfig(
        n_heads=h, n_kv_heads=g, head_dim=hd, d_conv=d_conv, d_conv_head=d_conv_head,
        position={"type": "rope", "fraction": 0.5, "theta": theta},
    ).build(BuildContext(d_model=D, param_dtype=torch.float64))
    given = layer.state_dict()
    mixer.load_state_dict({renamed(n): p.squeeze(1) if "depthwise.w" in n else p for n, p in given.items()})
    return mixer, layer, table


@pytest.mark.parametrize(("h", "g", "hd", "d_conv", "d_conv_head"), [(4, 2, 4, 2, 2), (3, 3, 4, 3, 1), (6, 1, 8, 1, 3)])
def test_equals_transformers(h, g, hd, d_conv, d_conv_head):
    mixer, layer, table = pair(h, g, hd, d_conv, d_conv_head)
    x = torch.randn(2, T, D, dtype=torch.float64, requires_grad=True)
    mask = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    want = layer(x, {"causal": mask}, position_embeddings=table)[0]
    got = mixer(x)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    weight, given = torch.randn_like(want), dict(layer.named_parameters())
    mine = dict(mixer.named_parameters())
    theirs = torch.autograd.grad((want * weight).sum(), [x, *given.values()])
    found = torch.autograd.grad((got * weight).sum(), [x, *(mine[renamed(n)] for n in given)])
    for name, a, b in zip(["x", *given], found, theirs, strict=True):
        torch.testing.assert_close(a, b.squeeze(1) if "depthwise.w" in name else b, rtol=0, atol=1e-10, msg=name)


def test_a_packed_document_starts_as_alone_bias_of_the_first_convolution_included():
    mixer, layer, table = pair(4, 2, 4, 3, 3)
    x = torch.randn(1, T, D, dtype=torch.float64)
    y = mixer(x, segments=Segments.from_lengths([[4, 5]]))[0]
    mask = torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    want = layer(x[:, 4:], {"causal": mask}, position_embeddings=tuple(z[:, :5] for z in table))[0]
    torch.testing.assert_close(y[:, 4:], want, rtol=0, atol=1e-11)


def test_values_of_odd_width_are_refused():
    with pytest.raises(ConfigError, match="n_kv_heads x head_dim = 3 must be even"):
        CCAConfig(n_heads=3, n_kv_heads=1, head_dim=3).build(BuildContext(d_model=D))
