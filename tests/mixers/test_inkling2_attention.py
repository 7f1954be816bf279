"""Relative attention with Inkling 2's options against transformers' layers, forward and gradients, packed and cached."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, Segments
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import RelativeAttentionConfig
from tests.inkling2 import of_attention

D, T, F64 = 10, 13, torch.float64
theirs2 = pytest.importorskip("transformers.models.inkling2.modeling_inkling2")
looped = pytest.importorskip("transformers.models.inkling2_loop.modeling_inkling2_loop")


class Layer(torch.nn.Module):
    """The first half of transformers' decoder layer, between its norms and its residual."""

    def __init__(self, module, prefix, config, kind):
        super().__init__()
        self.attention = getattr(module, f"{prefix}{kind}Attention")(config, 0)
        self.conv = getattr(module, f"{prefix}ShortConvolution")(D, config.conv_kernel_size, layer_idx=0, conv_idx=2)

    def forward(self, x, k_in, v_in, window):
        t = x.shape[1]
        seen = torch.ones(t, t).tril().triu(1 - (window or t)).bool()
        mask = torch.zeros(t, t, dtype=x.dtype).masked_fill(~seen, -torch.inf)[None, None]
        apart = torch.arange(t)[:, None] - torch.arange(t)
        options = {"attention_mask": mask, "relative_distance": apart, "position_ids": torch.arange(t)[None]}
        if k_in is not x or not window:
            options |= {"key_hidden_states": k_in, "value_hidden_states": v_in}
        with StrictFloat64():
            return self.conv(self.attention(x, **options)[0])


def ours(name, p, g):
    """Name and value in the mixer of a parameter of the layer."""
    if name == "conv.conv1d.weight":
        return "out_conv.weight", p.squeeze(1)
    return of_attention(name.removeprefix("attention."), p, g)


def pair(module, prefix, h, g, hd, window, extent, d_conv=3):
    kind = "Sliding" if window else "Full"
    config = getattr(module, f"{prefix}TextConfig")(
        hidden_size=D, num_attention_heads=h, num_key_value_heads=g, head_dim=hd, swa_num_attention_heads=h,
        swa_num_key_value_heads=g, swa_head_dim=hd, num_hidden_layers=1, d_rel=3, rel_extent=extent, conv_kernel_size=d_conv,
        sliding_window_size=window or 4, layer_types=["hybrid_sliding" if window else "hybrid"], log_scaling_n_floor=4,
        log_scaling_alpha=0.3, vocab_size=8, qk_l2_clip_threshold=1.5, rel_l2_clip_threshold=0.9, moe_intermediate_size=8,
    )
    config._attn_implementation = "eager"
    layer = Layer(module, prefix, config, kind).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) * 0.7)
    options = {} if window else {"log_floor": 4, "log_alpha": 0.3}
    mixer = RelativeAttentionConfig(
        n_heads=h, n_kv_heads=g, head_dim=hd, window=window, d_rel=3, rel_extent=extent, d_conv=d_conv,
        conv="scaled" if window else "dynamic", qk_norm="l2_clip", qk_clip=1.5, rel_clip=0.9, value_norm=True,
        query_sinks=True, output_gate=True, separate_inputs=True, **options,
    ).build(BuildContext(d_model=D, param_dtype=F64))
    mixer.load_state_dict(dict(ours(n, p, g) for n, p in layer.state_dict().items()))
    return mixer, layer


def edges(k_in, v_in):
    return {"key_input": k_in, "value_input": v_in}


CASES = [(4, 2, 4, None, 5), (3, 3, 5, None, 30), (6, 1, 4, None, 1), (4, 2, 3, 4, 4), (2, 1, 4, 1, 1)]
MODELS = [(theirs2, "Inkling2"), (looped, "Inkling2Loop")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("module", "prefix"), MODELS, ids=["inkling2", "inkling2_loop"])
@pytest.mark.parametrize(("h", "g", "hd", "window", "extent"), CASES)
def test_equals_transformers(module, prefix, h, g, hd, window, extent):
    torch.manual_seed(0)
    mixer, layer = pair(module, prefix, h, g, hd, window, extent)
    given = [torch.randn(2, T, D, dtype=F64, requires_grad=True) for _ in range(3)]
    want, got = layer(*given, window), mixer(given[0], edges=edges(*given[1:]))[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    upper, params = torch.randn_like(want), dict(layer.named_parameters())
    mine = dict(mixer.named_parameters())
    assert {ours(n, p, g)[0] for n, p in params.items()} == set(mine)
    theirs = torch.autograd.grad((want * upper).sum(), [*given, *params.values()])
    found = torch.autograd.grad((got * upper).sum(), [*given, *(mine[ours(n, p, g)[0]] for n, p in params.items())])
    for a, b in zip(found[:3], theirs[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    for name, a, b in zip(params, found[3:], theirs[3:], strict=True):
        assert b.any(), name
        torch.testing.assert_close(a, ours(name, b, g)[1], rtol=0, atol=1e-10, msg=name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("window", [None, 4])
def test_one_input_packed_and_token_by_token(window):
    torch.manual_seed(1)
    mixer, layer = pair(*MODELS[0], 4, 2, 4, window, window or 3)
    x = torch.randn(1, T, D, dtype=F64)
    want = layer(x, x, x, window)
    torch.testing.assert_close(mixer(x, edges=edges(x, x))[0], want, rtol=0, atol=1e-11)
    y = mixer(x, edges=edges(x, x), segments=Segments.from_ids(torch.tensor([[0, 0, 1, 1, 1, 0, 2, 2, 0, 2, 2, 2, 2]])))[0]
    at = [6, 7, 9, 10, 11, 12]
    torch.testing.assert_close(y[:, at], layer(x[:, at], x[:, at], x[:, at], window), rtol=0, atol=1e-11)
    state, rows = mixer.init_state(1), []
    for part in x.split([5, *[1] * (T - 5)], 1):
        y, state = mixer(part, edges=edges(part, part), state=state)
        rows.append(y)
    torch.testing.assert_close(torch.cat(rows, 1), want, rtol=0, atol=1e-11)
