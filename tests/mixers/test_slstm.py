from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import BuildContext, ConfigError, init_parameters
from hybridtf.mixers import SLSTMConfig

D = 6

# What the published layer gives (xlstm/blocks/slstm of https://github.com/NX-AI/xlstm, its vanilla backend, in float64), with
# the parameters and inputs below: the last output of row 1, the squared size of all outputs, the gradient at one token, the
# size of each parameter's gradient and of each final state.
PUBLISHED = {
    4: (
        [-1.195416071186826, -1.7941170848322892, -0.15044755912446753, 0.5329565717478493, 2.1054206562667606,
         0.8878707961467676],
        179.63692030426813,
        [0.041288588765821574, 0.4029607207597881, -0.5390152156962689, -12.66024665806122, -1.0331895405451104,
         0.6649602016274618],
        {"weight_hh": 17.71415520332567, "bias": 20.31498046422092, "conv.weight": 50.585286326608475,
         "conv.bias": 26.083162010349984, "i_proj.weight": 17.375501258114635, "f_proj.weight": 19.189568138030737,
         "z_proj.weight": 18.577607646210875, "o_proj.weight": 9.272309624646573, "norm.weight": 4.9343224494344655},
        {"h": 1.580630794382391, "c": 4.360636437672383, "n": 8.766245866643972, "m": 4.990383921539525},
    ),
    0: (
        [0.21077514803779213, -0.46417920327250123, -1.9855094962475333, 0.6779921709930176, 0.20546441666354834,
         1.9215734408361118],
        142.5864227231702,
        [-1.0061856563512506, 0.8934048737974505, 2.4637312166130623, 0.2464723056582989, 0.025148931927393568,
         -0.20544307562926076],
        {"weight_hh": 13.45596872111425, "bias": 7.423709753990879, "i_proj.weight": 14.62637056829695,
         "f_proj.weight": 4.514988389500832, "z_proj.weight": 17.42909981950865, "o_proj.weight": 13.14313630306849,
         "norm.weight": 7.356466666295226},
        {"h": 1.687740098994547, "c": 3.7501165999814186, "n": 4.739774572559212, "m": 12.710576706877134},
    ),
}


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
def test_values_gradients_and_states_are_the_published_ones(d_conv):
    last, size, at_two, sizes, states = PUBLISHED[d_conv]
    mixer = build(d_conv=d_conv)
    u = (2 * torch.cos(0.9 * torch.arange(2 * 11 * D, dtype=torch.float64))).view(2, 11, D).requires_grad_()
    y, state = mixer(u, state=mixer.init_state(2))
    assert y[1, -1].tolist() == pytest.approx(last, abs=1e-11)
    assert y.detach().square().sum().item() == pytest.approx(size, rel=1e-11)
    params = dict(mixer.named_parameters())
    du, *grads = torch.autograd.grad((y * waves(y.shape, 1.0)).sum(), [u, *params.values()])
    assert du[0, 2].tolist() == pytest.approx(at_two, abs=1e-10)
    assert {k: g.norm().item() for k, g in zip(params, grads, strict=True)} == pytest.approx(sizes, rel=1e-10)
    assert {k: state["cell"][k].detach().norm().item() for k in states} == pytest.approx(states, rel=1e-12)


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
