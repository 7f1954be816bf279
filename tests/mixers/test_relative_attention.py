"""Relative attention against transformers' layer of Inkling, its convolution of the output included, forward and gradients."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, Segments
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import RelativeAttentionConfig

D, T = 10, 13
inkling = pytest.importorskip("transformers.models.inkling.modeling_inkling")
NAMES = {
    "attention.o_proj": "out_proj", "attention.k_sconv.conv1d": "k_conv", "attention.v_sconv.conv1d": "v_conv",
    "attention.rel_logits_proj.proj": "rel_bank", "conv.conv1d": "out_conv", "attention.": "",
}


class Layer(torch.nn.Module):
    """The first half of transformers' decoder layer, between its norm and its residual."""

    def __init__(self, config):
        super().__init__()
        self.attention = inkling.InklingAttention(config, 0)
        self.conv = inkling.InklingShortConvolution(D, config.conv_kernel_size, layer_idx=0, conv_idx=2)

    def forward(self, x, window):
        t = x.shape[1]
        seen = torch.ones(t, t).tril().triu(1 - (window or t)).bool()
        mask = torch.zeros(t, t, dtype=x.dtype).masked_fill(~seen, -torch.inf)[None, None]
        with StrictFloat64():
            return self.conv(self.attention(x, mask)[0])


def renamed(name):
    for theirs, ours in NAMES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    raise KeyError(name)


def pair(h, g, hd, window, extent, floor, d_conv=3):
    config = inkling.InklingTextConfig(
        hidden_size=D, num_attention_heads=h, num_key_value_heads=g, head_dim=hd, swa_num_attention_heads=h,
        swa_num_key_value_heads=g, swa_head_dim=hd, num_hidden_layers=1, d_rel=3, rel_extent=extent, conv_kernel_size=d_conv,
        sliding_window_size=window or 4, layer_types=["hybrid_sliding" if window else "hybrid"], log_scaling_n_floor=floor,
        log_scaling_alpha=0.3, vocab_size=8, intermediate_size=8, mlp_layer_types=["dense"],
    )
    config._attn_implementation = "eager"
    layer = Layer(config).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) * 0.7)
    options = {"log_floor": floor, "log_alpha": 0.3} if floor else {}
    mixer = RelativeAttentionConfig(
        n_heads=h, n_kv_heads=g, head_dim=hd, window=window, d_rel=3, rel_extent=extent, d_conv=d_conv, **options
    ).build(BuildContext(d_model=D, param_dtype=torch.float64))
    mixer.load_state_dict({renamed(n): p.squeeze(1) if "conv1d" in n else p for n, p in layer.state_dict().items()})
    return mixer, layer


CASES = [(4, 2, 4, None, 5, 4), (3, 3, 5, None, 30, None), (6, 1, 4, None, 1, 2), (4, 2, 3, 4, 4, None)]


@pytest.mark.parametrize(("h", "g", "hd", "window", "extent", "floor"), CASES)
def test_equals_transformers(h, g, hd, window, extent, floor):
    torch.manual_seed(0)
    mixer, layer = pair(h, g, hd, window, extent, floor)
    x = torch.randn(2, T, D, dtype=torch.float64, requires_grad=True)
    want, got = layer(x, window), mixer(x)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    weight, given = torch.randn_like(want), dict(layer.named_parameters())
    mine = dict(mixer.named_parameters())
    theirs = torch.autograd.grad((want * weight).sum(), [x, *given.values()])
    found = torch.autograd.grad((got * weight).sum(), [x, *(mine[renamed(n)] for n in given)])
    for name, a, b in zip(["x", *given], found, theirs, strict=True):
        torch.testing.assert_close(a, b.squeeze(1) if "conv1d" in name else b, rtol=0, atol=1e-10, msg=name)


def test_a_packed_document_counts_from_its_own_start():
    torch.manual_seed(1)
    mixer, layer = pair(4, 2, 4, None, 3, 2)
    x = torch.randn(1, T, D, dtype=torch.float64)
    y = mixer(x, segments=Segments.from_ids(torch.tensor([[0, 0, 1, 1, 1, 0, 2, 2, 0, 2, 2, 2, 2]])))[0]
    at = [6, 7, 9, 10, 11, 12]
    torch.testing.assert_close(y[:, at], layer(x[:, at], None), rtol=0, atol=1e-11)
