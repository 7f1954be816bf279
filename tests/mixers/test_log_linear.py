"""Log-linear Mamba-2 against the matrix of other people's reference between the parts of Mamba-2."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import BuildContext
from hybridtf.mixers import LogLinearConfig, Mamba2Config
from tests.peers import peer

D, F64 = 12, torch.float64


def build(**options):
    config = LogLinearConfig(**{"d_state": 5, "head_dim": 4, "n_groups": 2, "n_levels": 6, "chunk_size": 4, **options})
    mixer = config.build(BuildContext(d_model=D, param_dtype=F64)).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        mixer.L.add_(0.5 * torch.randn_like(mixer.L))
    return mixer


@pytest.mark.parametrize("t", [1, 11, 26])
@pytest.mark.parametrize("options", [{}, {"n_groups": 1, "bias": True, "conv_bias": False, "norm_first": True}])
def test_equals_the_layer_of_others(options, t):
    """As fla's LogLinearMamba2: in_proj gives z, x, B, C, dt, dl; levels are weighed by softplus(L dl)."""
    naive = peer("fla/ops/log_linear_attn/naive.py").naive_log_linear_attn
    mixer = build(**options)
    h, p, n, g, width = mixer.n_heads, 4, 5, mixer.config.n_groups, mixer.d_inner

    def want(u):
        z, xbc, dt, dl = mixer.in_proj(u).split([width, width + 2 * g * n, h, 6 * h], -1)
        padded = F.pad(xbc.mT, (3, 0))
        xbc = F.silu(F.conv1d(padded, mixer.conv.weight[:, None], mixer.conv.bias, groups=xbc.shape[-1])).mT
        x, b, c = xbc.split([width, g * n, g * n], -1)
        x, b, c = x.unflatten(-1, (h, p)), b.unflatten(-1, (g, n)), c.unflatten(-1, (g, n))
        dt = F.softplus(dt + mixer.dt_bias)
        scales = F.softplus(mixer.L * dl.unflatten(-1, (h, 6)))
        y = naive(c, b, x * dt[..., None], -mixer.A_log.exp() * dt, scales)
        return mixer.out_proj(mixer.norm((y + mixer.D[:, None] * x).flatten(2), z))

    u = torch.randn(2, t, D, dtype=F64, requires_grad=True)
    got, expected = mixer(u)[0], want(u)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    weight, asked = torch.randn_like(got), [u, *mixer.parameters()]
    ours, theirs = (torch.autograd.grad((y * weight).sum(), asked) for y in (got, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


def test_equal_levels_make_it_mamba2():
    """With dl = 0 every level weighs softplus(0) = ln 2."""
    mixer = build()
    plain = Mamba2Config(d_state=5, head_dim=4, n_groups=2, chunk_size=4).build(BuildContext(d_model=D, param_dtype=F64))
    rows = sum(plain.splits["in_proj"].values())
    with torch.no_grad():
        mixer.in_proj.weight[rows:] = 0
        state = {name: value for name, value in mixer.state_dict().items() if name != "L"}
        plain.load_state_dict({**state, "in_proj.weight": mixer.in_proj.weight[:rows], "D": mixer.D / 0.6931471805599453})
        plain.norm.eps = mixer.norm.eps = 1e-30
        u = torch.randn(2, 19, D, dtype=F64)
        torch.testing.assert_close(mixer(u)[0], plain(u)[0], rtol=0, atol=1e-9)


def test_the_state_is_one_matrix_a_level_and_head_whatever_the_length():
    mixer = build()
    for t in (1, 9, 40):
        state = mixer(torch.randn(3, t, D, dtype=F64), state=mixer.init_state(3))[1]
        assert state["ssm"]["S"].shape == (3, 5, mixer.n_heads, 5, 4)
    used = [bool(state["ssm"]["S"][0, m].any()) for m in range(5)]
    assert used == [False, False, False, True, True]  # 40 = 101000 in binary; the last level takes bit 5 too
