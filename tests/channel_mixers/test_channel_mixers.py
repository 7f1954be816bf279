from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.channel_mixers import GLUConfig, MLPConfig
from hybridtf.core import BuildContext, ConfigError, active

CTX = BuildContext(d_model=6, param_dtype=torch.float64)
X = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
FUNCTIONS = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_mlp(name, bias):
    mixer = MLPConfig(d_ff=10, activation=name, bias=bias).build(CTX)
    y, state = mixer(X, state=())
    torch.testing.assert_close(y, mixer.down_proj(FUNCTIONS[name](mixer.up_proj(X))))
    assert state == ()
    assert (mixer.up_proj.bias is not None) == bias


@pytest.mark.parametrize(("preset", "name"), [("swiglu", "silu"), ("geglu", "gelu"), ("reglu", "relu")])
def test_glu_presets(preset, name):
    config = active()["channel_mixers"].make({"type": preset, "d_ff": 10})
    assert config == GLUConfig(d_ff=10, activation=name)
    mixer = config.build(CTX)
    want = mixer.down_proj(FUNCTIONS[name](mixer.gate_proj(X)) * mixer.up_proj(X))
    torch.testing.assert_close(mixer(X)[0], want)
    with pytest.raises(ConfigError, match="activation: is fixed to"):
        active()["channel_mixers"].make({"type": preset, "d_ff": 10, "activation": "relu2"})


def test_an_unknown_activation_names_the_nearest():
    with pytest.raises(ConfigError, match=r"activation: .*'gelu'.*Did you mean 'gelu'\?"):
        MLPConfig(d_ff=4, activation="gellu")
