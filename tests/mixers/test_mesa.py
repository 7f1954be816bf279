"""MesaNet against fla's exact loop, with the layer around it by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.core import BuildContext, ConfigError
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import MesaConfig
from tests.peers import peer

D = 10


def build(config: MesaConfig):
    mixer = config.build(BuildContext(d_model=D, param_dtype=torch.float64))
    with torch.no_grad():
        for param in mixer.parameters():
            param.add_(0.2 * torch.randn(param.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64))
    return mixer


def convolved(x: Tensor, conv) -> Tensor:
    """By torch's own convolution (b c t)."""
    w = conv.weight
    return F.silu(F.conv1d(F.pad(x.mT, (w.shape[1] - 1, 0)), w[:, None], conv.bias, groups=w.shape[0]).mT)


def by_hand(m, x: Tensor) -> Tensor:
    c, p = m.config, m.head_dim
    q, k = convolved(m.q_proj(x), m.conv.q), convolved(m.k_proj(x), m.conv.k)
    q, k, v = (z.unflatten(-1, (c.n_heads, p)) for z in (q, k, m.v_proj(x)))
    q, k = (z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt() for z in (q, k))
    ridge = F.softplus(m.ridge) + c.ridge_floor
    zero = torch.zeros(x.shape[0], c.n_heads, p, p, dtype=torch.float64)
    naive = peer("fla/ops/mesa_net/naive.py").naive_mesa_net_exact
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with StrictFloat64():
        y, *_ = naive(q, k, v, F.logsigmoid(m.a_proj(x)), ridge, torch.sigmoid(m.b_proj(x)), zero, zero)
    torch.set_default_dtype(before)
    y = (F.rms_norm(y, (p,), None, c.eps) * m.norm.weight).flatten(-2)
    return m.out_proj(y if m.gate_proj is None else y * F.silu(m.gate_proj(x)))


@pytest.mark.parametrize(
    "config",
    [
        MesaConfig(n_heads=2, chunk_size=4),
        MesaConfig(n_heads=3, head_dim=5, d_conv=3, conv_bias=True, output_gate=True, ridge_floor=0.5, chunk_size=8),
    ], ids=["published", "gated"],
)
def test_against_the_exact_loop_of_fla(config) -> None:
    mixer, gen = build(config), torch.Generator().manual_seed(1)
    x = torch.randn(2, 11, D, generator=gen, dtype=torch.float64, requires_grad=True)
    found, expected = mixer(x)[0], by_hand(mixer, x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    given = [x, *mixer.parameters()]
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), given) for y in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("floor", "start"), [(0.25, 1.0), (0.4, 1.0), (2.0, 4.0)])
def test_what_is_added_to_the_diagonal_of_a_fresh_layer(floor: float, start: float) -> None:
    mixer = MesaConfig(n_heads=2, ridge_floor=floor).build(BuildContext(d_model=D))
    torch.testing.assert_close(F.softplus(mixer.ridge) + floor, torch.full((2, 5), start))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="10 does not divide into n_heads = 3"):
        MesaConfig(n_heads=3).build(BuildContext(d_model=D))
