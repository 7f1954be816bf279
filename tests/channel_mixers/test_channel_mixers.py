from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.channel_mixers import ConvolvedConfig, EdgeGateConfig, GLUConfig, MLPConfig, ParallelChannelMixersConfig
from hybridtf.core import BuildContext, ConfigError, active, init_parameters
from hybridtf.nn import activation

CTX = BuildContext(d_model=6, param_dtype=torch.float64)
X = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
FUNCTIONS = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2, "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)), "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_mlp(name, bias):
    mixer = MLPConfig(d_ff=10, activation=name, bias=bias).build(CTX)
    y, state = mixer(X, state=())
    torch.testing.assert_close(y, mixer.down_proj(FUNCTIONS[name](mixer.up_proj(X))))
    assert state == ()
    assert (mixer.up_proj.bias is not None) == bias


@pytest.mark.parametrize(("preset", "name"), [
    ("swiglu", "silu"), ("geglu", "gelu"), ("geglu_tanh", "gelu_tanh"), ("reglu", "relu"),
])
def test_glu_presets(preset, name):
    config = active()["channel_mixers"].make({"type": preset, "d_ff": 10})
    assert config == GLUConfig(d_ff=10, activation=name)
    mixer = config.build(CTX)
    want = mixer.down_proj(FUNCTIONS[name](mixer.gate_proj(X)) * mixer.up_proj(X))
    torch.testing.assert_close(mixer(X)[0], want)
    with pytest.raises(ConfigError, match="activation: is fixed to"):
        active()["channel_mixers"].make({"type": preset, "d_ff": 10, "activation": "relu2"})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_glu(name):
    mixer = GLUConfig(d_ff=10, activation=name, bias=True).build(CTX)
    with torch.no_grad():
        for layer in (mixer.gate_proj, mixer.up_proj, mixer.down_proj):
            layer.bias.copy_(torch.linspace(-1, 1, layer.bias.numel()))
    want = mixer.down_proj(FUNCTIONS[name](mixer.gate_proj(X)) * mixer.up_proj(X))
    torch.testing.assert_close(mixer(X)[0], want)


def test_squared_relu_is_a_plain_preset():
    assert active()["channel_mixers"].make({"type": "relu2", "d_ff": 10}) == MLPConfig(d_ff=10, activation="relu2")


def test_the_clamped_unit_of_gpt_oss():
    config = active()["channel_mixers"].make({"type": "clamped_swiglu", "d_ff": 10})
    mixer = config.build(CTX)
    x = (40 * X).requires_grad_()
    gate, up = mixer.gate_proj(x), mixer.up_proj(x)
    assert bool((gate > 7).any())
    assert bool((up.abs() > 7).any())
    bounded = torch.where(gate > 7, 7.0, gate)
    want = mixer.down_proj((torch.where(up.abs() > 7, 7.0 * up.sign(), up) + 1) * bounded * torch.sigmoid(1.702 * bounded))
    got = mixer(x)[0]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (got, want)))


@pytest.mark.parametrize(("ours", "theirs"), [
    ("gelu_tanh", "gelu_pytorch_tanh"), ("gelu", "gelu"), ("quick_gelu", "quick_gelu"), ("relu2", "relu2"), ("silu", "silu"),
])
def test_activations_against_transformers(ours, theirs):
    activations = pytest.importorskip("transformers.activations")
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    torch.testing.assert_close(activation(ours)(x), activations.ACT2FN[theirs](x), rtol=1e-12, atol=1e-12)


def test_an_unknown_activation_names_the_nearest():
    with pytest.raises(ConfigError, match=r"activation: .*'gelu'.*Did you mean 'gelu'\?"):
        MLPConfig(d_ff=4, activation="gellu")


def test_a_learned_number_multiplies_what_is_convolved():
    plain, scaled = (
        ConvolvedConfig(channel_mixer=GLUConfig(d_ff=10), d_conv=3, learned_scale=learned).build(CTX)
        for learned in (False, True)
    )
    init_parameters(scaled, 0)
    plain.load_state_dict({name: value for name, value in scaled.state_dict().items() if name != "scale"})
    torch.testing.assert_close(scaled(X)[0], plain(X)[0], rtol=0, atol=0)
    with torch.no_grad():
        scaled.scale.fill_(-2.5)
    torch.testing.assert_close(scaled(X)[0], -2.5 * plain(X)[0])


def test_an_edge_gated_by_the_token():
    mixer = EdgeGateConfig(edge="told", d_edge=4, activation="gelu_tanh").build(CTX)
    told = torch.randn(2, 3, 4, dtype=torch.float64)
    y, _ = mixer(X, edges={"told": told})
    torch.testing.assert_close(y, (F.gelu(X @ mixer.gate_proj.weight.T, approximate="tanh") * told) @ mixer.out_proj.weight.T)
    assert EdgeGateConfig(d_edge=4).build(BuildContext(d_model=6, layer_idx=3)).reads == ("layer_input_3",)


def test_side_by_side():
    branches = [{"type": "swiglu", "d_ff": 8}, {"type": "moe", "n_experts": 3, "top_k": 2, "d_ff": 5, "z_loss": 0.1}]
    norms = [{"type": "rms_norm"}, {"type": "none"}]
    mixer = ParallelChannelMixersConfig(branches=branches, in_norms=norms, norm={"type": "rms_norm"}).build(CTX)
    y, state, extras = mixer(X, state=((), ()))
    first, (second, _, alone) = mixer.branches[0](mixer.in_norms[0](X))[0], mixer.branches[1](X)
    torch.testing.assert_close(y, mixer.norms[0](first) + mixer.norms[1](second))
    assert state == ((), ())
    assert extras.losses == alone.losses
    with pytest.raises(ConfigError, match="in_norms has 1 norms for 2 branches"):
        active()["channel_mixers"].make({"type": "parallel", "branches": branches, "in_norms": norms[:1]})


def test_gates_that_are_not_among_the_largest_are_0():
    x = torch.randn(2, 50, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mixer = GLUConfig(d_ff=512, gate_sparsity=0.9, activation="identity").build(CTX)
    gate = mixer.gate_proj(x)
    cut = gate.mean(-1, keepdim=True) + 1.2815515655446004 * gate.std(-1, correction=0, keepdim=True)
    torch.testing.assert_close(mixer(x)[0], mixer.down_proj(F.relu(gate - cut) * mixer.up_proj(x)))
    assert abs((gate > cut).double().mean() - 0.1) < 0.03
