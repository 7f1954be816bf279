"""Titans' memory layer against the memory of titans-pytorch, with the layer around it by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.core import BuildContext, ConfigError
from hybridtf.mixers import TitansConfig
from tests.titans_pytorch import by_titans_pytorch

D = 10


def build(config: TitansConfig):
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
    q, k, v = (
        convolved(proj(x), conv).unflatten(-1, (c.n_heads, p))
        for proj, conv in ((m.q_proj, m.conv.q), (m.k_proj, m.conv.k), (m.v_proj, m.conv.v))
    )
    q, k = (z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt() for z in (q, k))
    theta = torch.sigmoid(m.theta_proj(x)) * c.base_lr / c.mini_batch
    keep = torch.log(1 - torch.sigmoid(m.alpha_proj(x)))
    y, *_ = by_titans_pytorch(q, k, v, theta, torch.log(torch.sigmoid(m.eta_proj(x))), keep, list(m.M0), c.mini_batch)
    y = (F.rms_norm(y, (p,), None, c.eps) * m.norm.weight).flatten(-2)
    return m.out_proj(y * F.silu(m.gate_proj(x)))


@pytest.mark.parametrize(
    "config",
    [
        TitansConfig(n_heads=2, mini_batch=4),
        TitansConfig(n_heads=3, head_dim=4, memory_layers=1, mini_batch=3, base_lr=0.9, d_conv=3, conv_bias=True),
        TitansConfig(n_heads=2, memory_layers=3, memory_width=6, mini_batch=1),
    ], ids=["two layers", "a matrix", "three layers, token by token"],
)
def test_against_titans_pytorch(config) -> None:
    mixer, gen = build(config), torch.Generator().manual_seed(1)
    x = torch.randn(2, 11, D, generator=gen, dtype=torch.float64, requires_grad=True)
    found, expected = mixer(x)[0], by_hand(mixer, x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    given = [x, *mixer.parameters()]
    loss = torch.linspace(1, 2, found.numel(), dtype=torch.float64).view_as(found)
    pairs = zip(*(torch.autograd.grad((y * loss).sum(), given) for y in (found, expected)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_a_memory_learns_what_it_is_told_again() -> None:
    """Pairs of keys and values, each told four times: the memory answers the queries that are keys of old."""
    mixer = TitansConfig(n_heads=1, head_dim=16, memory_layers=1, mini_batch=4, base_lr=1.0).build(BuildContext(d_model=8))
    gen = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 4, 1, 16, generator=gen).repeat(1, 8, 1, 1) for _ in range(2))
    k = F.normalize(k, dim=-1)
    rates = {"theta": 0.25, "log_eta": -1.0, "log_a": 0.0}
    gates = {name: torch.full((1, 32, 1), value) for name, value in rates.items()}
    M0 = mixer.M0[0].detach().flatten(1)
    y, _ = mixer.memory(k, k, v, **gates, M0=M0, mini_batch=4, n_tokens=32)
    errors = (y - v).square().mean((0, 2, 3)).view(8, 4).mean(1)
    assert float(errors[-1]) < 0.05 * float(errors[0])


@pytest.mark.parametrize("layers", [1, 2])
def test_a_fresh_layer_does_not_diverge_on_one_token_over_and_over(layers: int) -> None:
    for m in (1, 16, 64):
        mixer = TitansConfig(n_heads=2, memory_layers=layers, mini_batch=m).build(BuildContext(d_model=32))
        x = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(0)).expand(1, 600, 32)
        with torch.no_grad():
            y, state = mixer(x, state=mixer.init_state(1))
        assert float(state["memory"]["M"].abs().max()) < 3
        # Two tokens at the same place of their mini-batches.
        torch.testing.assert_close(y[:, -1 - 128], y[:, -1], rtol=0, atol=0.2)


def test_what_starts_fresh() -> None:
    mixer = TitansConfig(n_heads=2).build(BuildContext(d_model=128))
    assert [tuple(layer.shape) for layer in mixer.M0] == [(2, 64, 256), (2, 256, 64)]
    assert [float(layer.detach().std()) for layer in mixer.M0] == pytest.approx([1 / 8, 1 / 16], rel=0.05)
    assert mixer.alpha_proj.bias.tolist() == [-4.0, -4.0]
    assert not bool(mixer.theta_proj.bias.any())
    assert not bool(mixer.eta_proj.bias.any())
    for projection in (mixer.theta_proj, mixer.eta_proj, mixer.alpha_proj):
        assert float(projection.weight.detach().std()) == pytest.approx(0.02, rel=0.2)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="10 does not divide into n_heads = 3"):
        TitansConfig(n_heads=3).build(BuildContext(d_model=D))
    with pytest.raises(ConfigError, match="memory_width = 8 does nothing beside memory_layers = 1"):
        TitansConfig(n_heads=2, memory_layers=1, memory_width=8)
