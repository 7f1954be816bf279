from __future__ import annotations

import math

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError, init_parameters
from hybridtf.mixers import Mamba3Config

D = 6

# What the published step reference gives (mamba3_siso_step_ref in tests/ops/triton/test_mamba3_siso.py of
# https://github.com/state-spaces/mamba, run on a CPU in float64 between the projections and norms of its Mamba3 module), with
# the parameters and inputs below: the last output of row 1, the squared size of all outputs, the gradient at one token, the
# size of each parameter's gradient, and of the final state of row 1 its size and the sum of its angles.
PUBLISHED = {
    "plain": (
        {"n_groups": 1, "rope_fraction": 0.5},
        [-0.6957801842918581, -0.1938233227541028, -0.603277793407935, -0.29109370843464133, -0.5023721022186728,
         -0.39445968362225],
        40.76904154138251,
        [0.0012254785100954914, 0.03092097144927893, -0.05713505629288518, 0.07238745400470314, -0.07375190490148165,
         0.06096663127954357],
        {"dt_bias": 0.1927604933779811, "D": 0.01670851268089815, "B_bias": 0.21422308410068222, "C_bias": 0.176970382234137,
         "in_proj.weight": 1.2164896908173823, "b_norm.weight": 0.17202048183042135, "c_norm.weight": 0.16018025472200914,
         "out_proj.weight": 0.8076823787472396},
        3.7594752895654353, 28.66836572506904,
    ),
    "norm, all rotated, two groups": (
        {"n_groups": 2, "rope_fraction": 1.0, "output_norm": True},
        [-0.39585360790682056, 0.31325669737574346, -0.3779173535730458, 0.2872718942662803, -0.3441865882143489,
         0.24618795297586235],
        76.74958467620891,
        [-0.8171122005243585, 0.8906239117365586, -0.7932643347061971, 0.5437124607906018, -0.18984624343045142,
         -0.2004430608864943],
        {"dt_bias": 0.4105732833856368, "D": 0.7604384763447235, "B_bias": 1.7621830018654092, "C_bias": 1.3128056549482359,
         "in_proj.weight": 6.01406471943918, "b_norm.weight": 1.6436470974929454, "c_norm.weight": 1.1835800897662114,
         "norm.weight": 0.1518829843182731, "out_proj.weight": 0.8427587084798223},
        3.360172144660916, 55.94273652135462,
    ),
}


def waves(shape, step, shift=0.0):
    return torch.sin(step * torch.arange(math.prod(shape), dtype=torch.float64) + shift).view(shape)


def build(**options):
    config = Mamba3Config(d_state=8, head_dim=3, chunk_size=4, **options)
    mixer = config.build(BuildContext(d_model=D, param_dtype=torch.float64)).eval()
    with torch.no_grad():
        for i, (name, p) in enumerate(sorted(mixer.named_parameters())):
            p.copy_(0.8 * waves(p.shape, 2.7) if name == "in_proj.weight" else 0.7 * waves(p.shape, 1.3, i) + 0.1 * i)
    return mixer


@pytest.mark.parametrize("name", PUBLISHED)
def test_values_gradients_and_states_are_the_published_ones(name):
    options, last, size, at_two, sizes, state_size, angles = PUBLISHED[name]
    mixer = build(**options)
    u = torch.cos(0.9 * torch.arange(2 * 11 * D, dtype=torch.float64)).view(2, 11, D).requires_grad_()
    y, state = mixer(u, state=mixer.init_state(2))
    assert y[1, -1].tolist() == pytest.approx(last, abs=1e-12)
    assert y.detach().square().sum().item() == pytest.approx(size, rel=1e-12)
    params = dict(mixer.named_parameters())
    du, *grads = torch.autograd.grad((y * waves(y.shape, 1.0)).sum(), [u, *params.values()])
    assert du[0, 2].tolist() == pytest.approx(at_two, abs=1e-12)
    assert {k: g.norm().item() for k, g in zip(params, grads, strict=True)} == pytest.approx(sizes, rel=1e-11)
    assert state["S"][1].detach().norm().item() == pytest.approx(state_size, rel=1e-12)
    assert state["angle"][1].detach().sum().item() == pytest.approx(angles, rel=1e-12)


def test_only_the_difference_of_angles_counts_and_many_turns_lose_nothing():
    """Float32 far along a document equals float64: angles are summed wide, and kept within one turn."""
    wide, narrow = build(), build().float()
    u = torch.cos(0.9 * torch.arange(3000 * D, dtype=torch.float64)).view(1, 3000, D)
    with torch.no_grad():
        (a, last_a), (b, last_b) = (m(x, state=m.init_state(1)) for m, x in ((wide, u), (narrow, u.float())))
    torch.testing.assert_close(b[:, -200:].double(), a[:, -200:], rtol=0, atol=2e-4)
    assert last_a["angle"].min() >= 0
    assert last_a["angle"].max() < 2 * math.pi
    turn = torch.exp(1j * last_a["angle"]) - torch.exp(1j * last_b["angle"].double())
    assert turn.abs().max() < 1e-3


def test_starts_where_the_published_code_does():
    mixer = Mamba3Config(d_state=8, head_dim=4).build(BuildContext(d_model=64))
    init_parameters(mixer, 1)
    dt = torch.nn.functional.softplus(mixer.dt_bias.detach())
    assert dt.min() >= 1e-3 - 1e-6
    assert dt.max() <= 0.1 + 1e-5
    for weight in (mixer.B_bias, mixer.C_bias, mixer.D, mixer.b_norm.weight, mixer.c_norm.weight):
        assert bool((weight == 1).all())


def test_what_cannot_be_built_is_refused():
    with pytest.raises(ConfigError, match=r"expand \* d_model = 12 is not divisible by head_dim = 5"):
        Mamba3Config(head_dim=5).build(BuildContext(d_model=6))
    with pytest.raises(ConfigError, match="4 heads are not divisible by n_groups = 3"):
        Mamba3Config(head_dim=3, n_groups=3).build(BuildContext(d_model=6))
    with pytest.raises(ValueError, match=r"rope_fraction = 0\.1 of d_state = 8 rotates no pair"):
        Mamba3Config(d_state=8, rope_fraction=0.1)
