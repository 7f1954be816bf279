from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, Segments
from hybridtf.mixers import GatedShortConvConfig

D, F64 = 10, torch.float64


def build(d_conv: int, bias: bool):
    mixer = GatedShortConvConfig(d_conv=d_conv, bias=bias).build(BuildContext(d_model=D, param_dtype=F64))
    with torch.no_grad():
        for p in mixer.parameters():
            p.copy_(torch.randn(p.shape, dtype=F64))
    return mixer


def theirs(mixer):
    """transformers' module with the same weights."""
    modeling = pytest.importorskip("transformers.models.lfm2.modeling_lfm2")
    from transformers import Lfm2Config

    config = Lfm2Config(
        hidden_size=D, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        conv_L_cache=mixer.config.d_conv, conv_bias=mixer.config.bias, vocab_size=8, full_attn_idxs=[1],
    )
    other = modeling.Lfm2ShortConv(config, 0).double()
    weights = {name: value.detach() for name, value in mixer.state_dict().items()}
    weights["conv.weight"] = weights["conv.weight"][:, None]
    other.load_state_dict(weights)
    return other


@pytest.mark.parametrize(("d_conv", "bias"), [(3, False), (4, True), (2, False)])
def test_forward_and_gradients_equal_transformers(d_conv, bias):
    mixer = build(d_conv, bias)
    other = theirs(mixer)
    x = torch.randn(2, 13, D, dtype=F64, requires_grad=True)
    weight = torch.randn(2, 13, D, dtype=F64)
    got, want = mixer(x)[0], other(x)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    names = [name for name, _ in mixer.named_parameters()]
    ours = torch.autograd.grad((got * weight).sum(), [x, *(mixer.get_parameter(name) for name in names)])
    them = torch.autograd.grad((want * weight).sum(), [x, *(other.get_parameter(name) for name in names)])
    for a, b in zip(ours, them, strict=True):
        torch.testing.assert_close(a, b.view_as(a), rtol=0, atol=1e-11)


@torch.no_grad()
def test_left_pads_do_not_enter_through_the_biases():
    mixer = build(3, True)
    x = torch.randn(1, 6, D, dtype=F64)
    padded = torch.cat([torch.full((1, 5, D), 7.0, dtype=F64), x], 1)
    segments = Segments.from_mask((torch.arange(11) >= 5)[None])
    torch.testing.assert_close(mixer(padded, segments=segments)[0][:, 5:], mixer(x)[0], rtol=0, atol=1e-12)
