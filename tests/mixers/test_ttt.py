"""TTT-Linear against numbers of the published layer, and its mini-batches told from outside.

The numbers: TTTLinear of ttt-lm-pytorch (its formulas, typed out and run in float64, since it is no package), with the weights
and input of :func:`wave`, in the forms of both of its backbones.
"""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import BuildContext, ConfigError
from hybridtf.mixers import TTTLinearConfig

PLAIN = (
    [-1.154423, -0.9301215, -0.6150775, -0.2400268, 0.1584409, 0.5414512, 0.8716376, 1.1167872],
    [-0.9532902, -0.674463, -0.3298353, 0.046971, 0.4191949, 0.7505222, 1.0086288, 1.1683337],
    [-0.5704387, -0.41107, -0.2115975, 0.0085185, 0.2278033, 0.4248638, 0.5804746, 0.6794545],
)
PLAIN_GRADIENTS = [
    597.89027, 152.95587, 175.35963, 493.80278, 6.88129, 55.21418, 201.00068, 236.71366, 802.38091, 19.2367, 436.50538,
    249.70041, 638.96981, 140.8682,
]
GATED = (
    [-0.2332853, 0.0936764, 0.1889769, -0.1830615, -0.1023897, 0.2314913, -0.0071046, -0.2281309],
    [-0.1366232, 0.211319, 0.0366704, -0.2286639, 0.0714866, 0.1948511, -0.1636502, -0.1174454],
    [-0.0249321, 0.1471712, -0.0446792, -0.1260382, 0.1042946, 0.0767073, -0.1405768, -0.0102152],
)
GATED_GRADIENTS = [
    21.29993, 3.07276, 1.29771, 1.3357, 2.8825, 1.68943, 3.47811, 30.08965, 0.05537, 0.26532, 1.78221, 1.62199, 6.49572,
    0.25231, 4.22439, 2.71491, 5.01281, 0.86006,
]


def wave(i: int, shape) -> torch.Tensor:
    n = torch.Size(shape).numel()
    return torch.sin(torch.arange(n, dtype=torch.float64) * (0.7 + 0.13 * i) + i).view(shape)


@pytest.mark.parametrize(
    ("more", "y", "gradients"),
    [({}, PLAIN, PLAIN_GRADIENTS), ({"d_conv": 3, "output_gate": True}, GATED, GATED_GRADIENTS)],
    ids=["plain", "conv and gate"],
)
def test_numbers_of_the_published_layer(more, y, gradients) -> None:
    """Gradients: of the sum of squares, in x and in each parameter by name, as sums of absolute values."""
    config = TTTLinearConfig(n_heads=2, mini_batch=4, base_lr=2.0, rope_theta=100.0, **more)
    mixer = config.build(BuildContext(d_model=8, param_dtype=torch.float64))
    params = [p for _, p in sorted(mixer.named_parameters())]
    with torch.no_grad():
        for i, p in enumerate(params):
            p.copy_(wave(i, p.shape) * 0.6)
    x = wave(20, (2, 11, 8)).requires_grad_()
    out, _ = mixer(x)
    torch.testing.assert_close(out[1, [0, 5, 10]], torch.tensor(y, dtype=torch.float64), rtol=0, atol=1e-7)
    found = torch.stack([g.abs().sum() for g in torch.autograd.grad(out.square().sum(), [x, *params])])
    torch.testing.assert_close(found, torch.tensor(gradients, dtype=torch.float64), rtol=1e-5, atol=1e-5)


def test_rates_and_start_of_a_fresh_layer() -> None:
    mixer = TTTLinearConfig(n_heads=2).build(BuildContext(d_model=16))
    torch.testing.assert_close(mixer._rates(torch.float32), 1 / torch.arange(1.0, 17.0))
    with torch.no_grad():
        mixer.place_bias.fill_(-0.5)
    assert mixer._rates(torch.float32).tolist() == [0.5, *[0.0] * 15]
    assert float(mixer.W0.detach().std()) == pytest.approx(0.02, rel=0.3)
    assert not any(bool(p.any()) for p in (mixer.b0, mixer.norm_bias, mixer.lr_proj.bias))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="8 does not divide into n_heads = 3"):
        TTTLinearConfig(n_heads=3).build(BuildContext(d_model=8))
    with pytest.raises(ConfigError, match=r"head_dim 3 x fraction 1\.0 = 3 must be even"):
        TTTLinearConfig(n_heads=3).build(BuildContext(d_model=9))
