from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, init_parameters
from hybridtf.mixers import MLSTMConfig

D = 24


def build(**options):
    config = MLSTMConfig(**{"n_heads": 3, "chunk_size": 4, **options})
    mixer = config.build(BuildContext(d_model=D, param_dtype=torch.float64)).eval()
    with torch.no_grad():
        for i, p in enumerate(mixer.parameters()):
            p.add_(0.4 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype))
    return mixer


def theirs(mixer):
    """The layer of transformers, with its torch kernels, holding the mixer's parameters."""
    xlstm = pytest.importorskip("transformers.models.xlstm.modeling_xlstm")
    config = mixer.config
    outside = xlstm.xLSTMConfig(
        hidden_size=D, num_heads=config.n_heads, use_bias=config.bias, qk_dim_factor=config.expand_k,
        v_dim_factor=config.expand_v, chunk_size=config.chunk_size, gate_soft_cap=config.gate_softcap, eps=config.eps,
        norm_eps=config.norm_eps, norm_reduction_force_float32=False, num_hidden_layers=1,
    )
    outside.__dict__["inference_state_dtype"] = "float64"  # which its checks do not allow, and its kernels do
    layer = xlstm.xLSTMLayer(outside).double()
    names = {
        "q_proj": "q", "k_proj": "k", "v_proj": "v", "gate_proj": "ogate_preact", "i_proj": "igate_preact",
        "f_proj": "fgate_preact", "norm": "multihead_norm", "out_proj": "out_proj",
    }
    pairs = {}
    for name, param in mixer.named_parameters():
        module, _, leaf = name.partition(".")
        pairs[name] = dict(layer.named_parameters())[f"{names[module]}.{leaf}"]
        pairs[name].data.copy_(param.data)
    assert len(pairs) == len(list(layer.parameters()))
    return layer, list(pairs.values())


@pytest.mark.parametrize(
    "options", [{}, {"bias": True, "expand_v": 2.0}, {"expand_k": 1.0, "gate_softcap": 3.0, "eps": 0.1}]
)
@pytest.mark.parametrize("t", [13, 1])
def test_forward_gradients_and_states_equal_those_of_transformers(t, options):
    mixer = build(**options)
    layer, params = theirs(mixer)
    x = torch.randn(2, t, D, generator=torch.Generator().manual_seed(7), dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, t, D, dtype=torch.float64)
    y, state = mixer(x, state=mixer.init_state(2))
    want, (c, n, m) = layer(x)
    torch.testing.assert_close(y, want, rtol=0, atol=1e-11)
    torch.testing.assert_close(state["S"], torch.cat([c, n[..., None]], -1), rtol=0, atol=1e-11)
    torch.testing.assert_close(state["m"], m[..., 0], rtol=0, atol=1e-11)
    ours = torch.autograd.grad((y * weight).sum() + state["S"].sum(), [x, *mixer.parameters()], allow_unused=True)
    refs = torch.autograd.grad((want * weight).sum() + c.sum() + n.sum(), [x, *params], allow_unused=True)
    for a, b in zip(ours, refs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_state_of_transformers_is_gone_on_with():
    mixer = build()
    layer, _ = theirs(mixer)
    x = torch.randn(2, 9, D, dtype=torch.float64)
    with torch.no_grad():
        _, (c, n, m) = layer(x[:, :4])
        state = mixer.init_state(2)
        state.data.update(S=torch.cat([c, n[..., None]], -1), m=m[..., 0])
        y, _ = mixer(x[:, 4:], state=state)
        torch.testing.assert_close(y, layer(x)[0][:, 4:], rtol=0, atol=1e-11)


def test_starts_nearly_closed_and_remembering():
    mixer = MLSTMConfig(n_heads=4).build(BuildContext(d_model=16))
    init_parameters(mixer, 3)
    assert not mixer.i_proj.weight.any()
    assert not mixer.f_proj.weight.any()
    torch.testing.assert_close(mixer.i_proj.bias.detach(), torch.full((4,), -10.0))
    torch.testing.assert_close(mixer.f_proj.bias.detach(), torch.tensor([3.0, 4.0, 5.0, 6.0]))


def test_widths_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"expand_k \* d_model = 10 does not divide into n_heads = 4"):
        MLSTMConfig(n_heads=4).build(BuildContext(d_model=20))
