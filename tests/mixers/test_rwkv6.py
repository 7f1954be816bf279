"""RWKV-5 and -6: the paper's equations around fla's plain loop, torch's own group norm, and the starts that are published."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.core import BuildContext, ConfigError
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import RWKV5Config, RWKV6Config
from tests.peers import peer

D = 12
ORDER = {"rwkv5": "rkvg", "rwkv6": "wkvrg"}


def build(config, d_model: int = D, **ctx):
    mixer = config.build(BuildContext(d_model=d_model, param_dtype=torch.float64, **ctx)).eval()
    gen = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in mixer.parameters():
            param.add_(0.3 * torch.randn(param.shape, generator=gen, dtype=torch.float64))
    return mixer


def by_hand(m, x: Tensor) -> Tensor:
    """(b t d), by section 4 of the paper."""
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    own: dict[str, Tensor | float] = dict.fromkeys("rkvgw", 0.0)
    names = ORDER[m.config.type]
    if m.config.type == "rwkv6":
        z = torch.lerp(x, before, m.mu_x)
        down = torch.tanh(z @ m.mix_down_proj.weight.T).chunk(5, -1)
        own = {name: part @ m.mix_up[i] for i, (name, part) in enumerate(zip(names, down, strict=True))}
    mixed = {name: torch.lerp(x, before, m.mu[i] + own[name]) for i, name in enumerate(names)}
    decay = m.decay.expand_as(x)
    if m.config.type == "rwkv6":
        decay = decay + torch.tanh(mixed["w"] @ m.decay_proj.down_proj.weight.T) @ m.decay_proj.up_proj.weight.T
    r, k, v = (mixed[name] @ getattr(m, f"{name}_proj").weight.T for name in "rkv")
    heads = [y.unflatten(-1, (m.n_heads, -1)).transpose(1, 2) for y in (r, k, v, -torch.exp(decay))]
    with StrictFloat64():
        y, _ = peer("fla/ops/rwkv6/recurrent_naive.py").naive_recurrent_rwkv6(*heads, m.bonus, scale=1.0)
    rows = y.transpose(1, 2).reshape(-1, D)
    normed = F.group_norm(rows / 8, m.n_heads, m.norm.weight, m.norm.bias, 1e-5).view_as(x)
    return (normed * F.silu(mixed["g"] @ m.gate_proj.weight.T)) @ m.out_proj.weight.T


@pytest.mark.parametrize(
    "config",
    [
        RWKV5Config(head_dim=4), RWKV5Config(head_dim=3, chunk_size=5),
        RWKV6Config(head_dim=4), RWKV6Config(head_dim=6, mix_rank=3, decay_rank=5, chunk_size=4),
    ],
    ids=lambda c: c.type,
)
def test_forward_and_gradients_equal_the_equations(config) -> None:
    mixer = build(config, layer_idx=1, n_layers=3)
    x = torch.randn(2, 11, D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 11, D, dtype=torch.float64)
    got, want = mixer(x)[0], by_hand(mixer, x)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
    params = [x, *mixer.parameters()]
    ours, theirs = (torch.autograd.grad((y * weight).sum(), params) for y in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("layer", [0, 2, 5])
def test_starts_of_the_published_code(layer: int) -> None:
    """Channel by channel, as RWKV-LM fills them."""
    n_layers, d = 6, 8
    late, left = layer / (n_layers - 1), 1 - layer / n_layers
    for config in (RWKV5Config(head_dim=4), RWKV6Config(head_dim=4)):
        m = config.build(BuildContext(d_model=d, layer_idx=layer, n_layers=n_layers))
        for c in range(d):
            place, end = c / d, c / (d - 1)
            kept = {"w": place**left, "k": place**left, "v": place**left + 0.3 * late}
            kept |= {"r": place ** (0.5 * left), "g": place ** (0.5 * left)}
            for i, name in enumerate(ORDER[config.type]):
                assert float(m.mu[i, c].detach()) == pytest.approx(1 - kept[name], abs=1e-6)
            assert float(m.decay[c].detach()) == pytest.approx(-6 + 5 * end ** (0.7 + 1.3 * late), abs=1e-5)
            bonus = late * (1 - end) + ((c + 1) % 3 - 1) * 0.1
            assert float(m.bonus.flatten()[c].detach()) == pytest.approx(bonus, abs=1e-6)
        if config.type == "rwkv6":
            assert float(m.mu_x[3].detach()) == pytest.approx(1 - (3 / d) ** left, abs=1e-6)
            assert not m.mix_down_proj.weight.any()
            assert not m.decay_proj.down_proj.weight.any()
            assert 0.005 < float(m.mix_up.detach().abs().max()) <= 0.01


def test_a_decay_of_any_size_leaves_numbers_and_gradients_finite() -> None:
    for config in (RWKV5Config(head_dim=4), RWKV6Config(head_dim=4)):
        m = config.build(BuildContext(d_model=D))
        x = torch.randn(1, 70, D)
        with torch.no_grad():
            m.decay.copy_(torch.linspace(-300, 300, D))
        y = m(x)[0]
        y.square().sum().backward()
        assert y.isfinite().all()
        for name, param in m.named_parameters():
            assert param.grad is not None, name
            assert param.grad.isfinite().all(), name


def test_a_width_that_is_no_multiple_of_heads_is_refused() -> None:
    for config in (RWKV5Config(), RWKV6Config()):
        with pytest.raises(ConfigError, match="d_model = 12 is not divisible by head_dim = 64"):
            config.build(BuildContext(d_model=D))
