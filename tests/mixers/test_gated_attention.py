"""Gated attention against transformers' layer of Qwen3-Next, forward and every gradient."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import GatedAttentionConfig

D, T = 12, 9
qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")


def by_transformers(h, g, hd, bias):
    config = qwen3_next.Qwen3NextConfig(
        hidden_size=D, num_attention_heads=h, num_key_value_heads=g, head_dim=hd, num_hidden_layers=1,
        attention_bias=bias, partial_rotary_factor=0.25, rms_norm_eps=1e-6, layer_types=["full_attention"],
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(3)
    layer = qwen3_next.Qwen3NextAttention(config, 0).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) * 0.4)
    with StrictFloat64():
        table = qwen3_next.Qwen3NextRotaryEmbedding(config)(torch.zeros(1, T, D).double(), torch.arange(T)[None])
    return layer, table


@pytest.mark.parametrize(("h", "g", "hd", "bias"), [(4, 2, 8, False), (3, 3, 8, True), (6, 1, 24, False)])
def test_equals_transformers(h, g, hd, bias):
    layer, table = by_transformers(h, g, hd, bias)
    mixer = GatedAttentionConfig(n_heads=h, n_kv_heads=g, head_dim=hd, bias=bias).build(
        BuildContext(d_model=D, param_dtype=torch.float64)
    )

    def roles_together(w):
        """Heads of (query, gate) to all queries, then all gates."""
        return w.unflatten(0, (h, 2, hd)).transpose(0, 1).flatten(0, 2)

    given = dict(layer.named_parameters())
    renamed = {name.replace("o_proj", "out_proj"): p for name, p in given.items()}
    ours = {n: roles_together(p) if n.startswith("q_proj") else p.detach() for n, p in renamed.items()}
    mixer.load_state_dict(ours)
    x = torch.randn(2, T, D, dtype=torch.float64, requires_grad=True)
    mask = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with StrictFloat64():
        want = layer(x, table, mask)[0]
    got = mixer(x)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    weight = torch.randn_like(want)
    theirs = torch.autograd.grad((want * weight).sum(), [x, *given.values()])
    mine = torch.autograd.grad((got * weight).sum(), [x, *(dict(mixer.named_parameters())[n] for n in renamed)])
    torch.testing.assert_close(mine[0], theirs[0], rtol=0, atol=1e-11)
    for name, a, b in zip(renamed, mine[1:], theirs[1:], strict=True):
        torch.testing.assert_close(a, roles_together(b) if name.startswith("q_proj") else b, rtol=0, atol=1e-11, msg=name)


def test_heads_that_do_not_fit_are_named():
    with pytest.raises(ConfigError, match="d_model = 12 is not divisible by n_heads = 5; give head_dim"):
        GatedAttentionConfig(n_heads=5).build(BuildContext(d_model=D))
