from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import BuildContext, ConfigError, init_parameters
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import SLSTMConfig
from tests.mixers.plain_parts import given, same
from tests.peers import peer

D = 6

def waves(shape, step, shift=0.0):
    return torch.sin(step * torch.arange(math.prod(shape), dtype=torch.float64) + shift).view(shape)


def build(**options):
    config = SLSTMConfig(**{"n_heads": 2, "chunk_size": 4, **options})
    mixer = config.build(BuildContext(d_model=D, param_dtype=torch.float64)).eval()
    with torch.no_grad():
        for i, (_, p) in enumerate(sorted(mixer.named_parameters())):
            p.copy_(1.5 * waves(p.shape, 2.3, i))
    return mixer


@pytest.mark.parametrize("d_conv", [4, 0])
@pytest.mark.parametrize("t", [2, 11])
def test_values_gradients_and_states_are_those_of_the_layer_of_xlstm(t, d_conv):
    """The published layer, by its plain backend. What it calls fgate makes i, and igate f; its norm has weight 1 + w."""
    mixer, x = build(d_conv=d_conv), given(2, t, D)
    module = peer("xlstm.blocks.slstm.layer")
    theirs = module.sLSTMLayer(
        module.sLSTMLayerConfig(embedding_dim=D, num_heads=2, conv1d_kernel_size=d_conv, backend="vanilla", dtype="float32")
    )
    weights = {
        "fgate.weight": mixer.i_proj.weight.mT, "igate.weight": mixer.f_proj.weight.mT, "zgate.weight": mixer.z_proj.weight.mT,
        "ogate.weight": mixer.o_proj.weight.mT, "group_norm.weight": mixer.norm.weight - 1,
        "slstm_cell._recurrent_kernel_": mixer.weight_hh.mT,
        "slstm_cell._bias_": mixer.bias.unflatten(1, (4, -1)).transpose(0, 1).flatten(),
    }
    if d_conv:
        weights |= {"conv1d.conv.weight": mixer.conv.weight[:, None], "conv1d.conv.bias": mixer.conv.bias}
    with StrictFloat64():
        want, last = torch.func.functional_call(theirs, weights, x, {"return_last_state": True})
    got, state = mixer(x, state=mixer.init_state(2))
    same(got, want, x, mixer)
    for name, theirs_last in zip("hcnm", last["slstm_state"], strict=True):
        torch.testing.assert_close(state["cell"][name].flatten(1), theirs_last, rtol=0, atol=1e-11)


def test_it_is_an_average_of_what_was_written():
    """Without the maximum, by the paper's first form: c and n with plain exponentials, h = sigmoid(o) c / n."""
    mixer = build(d_conv=0)
    with torch.no_grad():
        x = torch.randn(1, 9, D, dtype=torch.float64)
        p = D // 2
        h = c = n = torch.zeros(2, p, dtype=torch.float64)
        for t in range(9):
            heads = x[0, t].view(2, p)
            gates = [torch.einsum("hp,hpq->hq", heads, getattr(mixer, f"{g}_proj").weight) for g in "ifzo"]
            raw = torch.cat(gates, -1) + torch.einsum("hp,hpq->hq", h, mixer.weight_hh) + mixer.bias
            i, f, z, o = raw.chunk(4, -1)
            c, n = torch.sigmoid(f) * c + i.exp() * z.tanh(), torch.sigmoid(f) * n + i.exp()
            h = torch.sigmoid(o) * c / n
        want = F.layer_norm(h, (p,), eps=1e-5).flatten() * mixer.norm.weight
        torch.testing.assert_close(mixer(x)[0][0, -1], want, rtol=0, atol=1e-11)


def test_starts_where_the_published_code_does():
    for layer, power in ((0, 0.3), (3, 1.6)):
        mixer = SLSTMConfig(n_heads=2).build(BuildContext(d_model=16, layer_idx=layer, n_layers=4))
        init_parameters(mixer, 2)
        bias = mixer.bias.detach().view(2, 4, 8)
        torch.testing.assert_close(bias[0, 1], 5 - 12 * (torch.arange(8) / 7) ** power)
        assert not bias[:, [0, 2, 3]].any()
        assert not mixer.weight_hh.any()


def test_a_width_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="d_model = 6 does not divide into n_heads = 4 heads"):
        SLSTMConfig().build(BuildContext(d_model=6))
