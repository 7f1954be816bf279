"""Differential attention against transformers' layer of DiffLlama, forward and every gradient."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import DifferentialAttentionConfig

D, T = 12, 9
diffllama = pytest.importorskip("transformers.models.diffllama.modeling_diffllama")


def in_pairs(w, g, hd):
    """Values as they have them (the first halves of all heads, then the second) to ours (head by head)."""
    return w.unflatten(0, (2, g, hd)).transpose(0, 1).flatten(0, 2)


@pytest.mark.parametrize(("h", "g", "hd", "layer_idx"), [(3, 3, 2, 0), (4, 2, 6, 3), (4, 1, 4, 11)])
def test_equals_transformers(h, g, hd, layer_idx):
    config = diffllama.DiffLlamaConfig(
        hidden_size=D, num_attention_heads=2 * h, num_key_value_heads=2 * g, head_dim=hd, num_hidden_layers=12,
        rms_norm_eps=1e-5,
    )
    config._attn_implementation = "sdpa"
    layer = diffllama.DiffLlamaAttention(config, layer_idx).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) * 0.4)
    with StrictFloat64():
        table = diffllama.DiffLlamaRotaryEmbedding(config)(torch.zeros(1, T, D).double(), torch.arange(T)[None])
    mixer = DifferentialAttentionConfig(
        n_heads=h, n_kv_heads=g, head_dim=hd, norm={"type": "rms_norm", "eps": 1e-5, "weight": False}
    ).build(BuildContext(d_model=D, param_dtype=torch.float64, layer_idx=layer_idx))
    given = {n.replace("o_proj", "out_proj"): p for n, p in layer.named_parameters()}
    mixer.load_state_dict({n: in_pairs(p, g, hd) if n.startswith("v_proj") else p.detach() for n, p in given.items()})
    x = torch.randn(2, T, D, dtype=torch.float64, requires_grad=True)
    mask = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with StrictFloat64():
        want = layer(x, table, mask)[0]
    got = mixer(x)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    weight, mine = torch.randn_like(want), dict(mixer.named_parameters())
    theirs = torch.autograd.grad((want * weight).sum(), [x, *given.values()])
    found = torch.autograd.grad((got * weight).sum(), [x, *(mine[n] for n in given)])
    for name, a, b in zip(["x", *given], found, theirs, strict=True):
        b = in_pairs(b, g, hd) if name.startswith("v_proj") else b
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9, msg=name)


def test_width_of_a_head_is_half():
    assert DifferentialAttentionConfig(n_heads=3).build(BuildContext(d_model=D)).head_dim == 2
    with pytest.raises(ConfigError, match="d_model = 12 is not divisible by 2 x n_heads = 8; give head_dim"):
        DifferentialAttentionConfig(n_heads=4).build(BuildContext(d_model=D))


def test_what_it_takes_away_grows_with_depth():
    shares = [DifferentialAttentionConfig.tiny().build(BuildContext(d_model=D, layer_idx=i)).lambda_init for i in (0, 3, 27)]
    assert shares == pytest.approx([0.2, 0.55606, 0.79982], abs=1e-5)
