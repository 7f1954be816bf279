"""The mixer: the laws of its contract, and that it is the average it says it is."""

import math

import torch
import torch.nn.functional as F
from hybridtf_example.mixer import GatedEmaConfig

from hybridtf.core import BuildContext
from hybridtf.testing import check_mixer


def test_the_laws() -> None:
    check_mixer(GatedEmaConfig.tiny())


def test_it_is_a_moving_average() -> None:
    mixer = GatedEmaConfig(half_life=4.0).build(BuildContext(d_model=3, param_dtype=torch.float64))
    x = torch.randn(2, 37, 3, dtype=torch.float64)
    v, a = mixer.v_proj(x), torch.exp(-torch.exp(mixer.log_rate))
    s, rows = torch.zeros(2, 3, dtype=torch.float64), []
    for v_t in v.unbind(1):
        s = a * s + (1 - a) * v_t
        rows.append(s)
    want = mixer.out_proj(torch.stack(rows, 1) * F.silu(mixer.gate_proj(x)))
    torch.testing.assert_close(mixer(x)[0], want, rtol=1e-12, atol=1e-12)


def test_half_is_forgotten_after_the_half_life() -> None:
    mixer = GatedEmaConfig(half_life=8.0).build(BuildContext(d_model=64))
    lives = math.log(2) / mixer.log_rate.exp()
    assert 8 / math.e <= lives.min() <= lives.max() <= 8 * math.e
