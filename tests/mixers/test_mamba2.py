from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import BuildContext, ConfigError, Segments
from hybridtf.mixers import Mamba2Config

D = 12


def build(dtype=torch.float64, **options):
    options = {"d_state": 5, "head_dim": 4, "n_groups": 2, "chunk_size": 4, **options}
    return Mamba2Config(**options).build(BuildContext(d_model=D, param_dtype=dtype)).eval()


def by_hand(mixer, u):
    """One row (t d), token by token, from the equations at the top of the module."""
    config, h, p, n, g = mixer.config, mixer.n_heads, mixer.config.head_dim, mixer.config.d_state, mixer.config.n_groups
    widths = [h * p, h * p, g * n, g * n, h]
    z, *xbc, dt = (y * s for y, s in zip(mixer.in_proj(u).split(widths, -1), config.in_scale or [1.0] * 5, strict=True))
    xbc = torch.cat(xbc, -1)
    padded = torch.cat([xbc.new_zeros(config.d_conv - 1, xbc.shape[1]), xbc])
    S, rows = torch.zeros(h, n, p, dtype=u.dtype), []
    for t in range(len(u)):
        conv = (padded[t : t + config.d_conv] * mixer.conv.weight.T).sum(0)
        conv = F.silu(conv + mixer.conv.bias) if mixer.conv.bias is not None else F.silu(conv)
        x, b, c = conv.split([h * p, g * n, g * n])
        x, b, c = x.view(h, p), b.view(g, n).repeat_interleave(h // g, 0), c.view(g, n).repeat_interleave(h // g, 0)
        step = F.softplus(dt[t] + mixer.dt_bias)
        if config.dt_limit:
            step = step.clamp(*config.dt_limit)
        S = torch.exp(-torch.exp(mixer.A_log) * step)[:, None, None] * S + step[:, None, None] * b[:, :, None] * x[:, None, :]
        y = torch.einsum("hnp,hn->hp", S, c) + mixer.D[:, None] * x
        rows.append(y.flatten() * F.silu(z[t]) if mixer.norm is None else mixer.norm(y.flatten(), z[t]))
    return mixer.out_proj(torch.stack(rows))


@pytest.mark.parametrize(
    "options",
    [
        {}, {"n_groups": 1}, {"n_groups": 6}, {"bias": True, "conv_bias": False}, {"dt_limit": (0.02, 0.05)},
        {"norm_first": True}, {"norm": False}, {"d_conv": 1}, {"d_conv": 2, "n_heads": 4}, {"expand": 1.0, "n_groups": 3},
        {"in_scale": (1.1, 0.7, 1.4, 0.6, 0.85), "bias": True},
    ],
)
def test_forward_and_gradients_equal_the_plain_loop(options):
    mixer = build(**options)
    u = torch.randn(11, D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, D, dtype=torch.float64)
    got, want = mixer(u[None])[0][0], by_hand(mixer, u)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    params = [u, *mixer.parameters()]
    ours, theirs = (torch.autograd.grad((y * weight).sum(), params) for y in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_starts_where_the_paper_says_alone_and_in_any_dtype():
    for dtype in (torch.float32, torch.bfloat16):
        mixer = Mamba2Config(head_dim=4, d_state=4).build(BuildContext(d_model=256, param_dtype=dtype))
        dt = F.softplus(mixer.dt_bias.detach().float())
        assert 0.0009 < float(dt.min()) < 0.003
        assert 0.03 < float(dt.max()) < 0.11
        rates = mixer.A_log.detach().float().exp()
        assert 0.99 < float(rates.min()) < 2
        assert 14 < float(rates.max()) < 16.1
        assert (mixer.D == 1).all()


def test_decay_of_a_rounded_parameter_is_exact():
    """Only A_log is stored in bf16; its exponential must not be taken there."""
    mixer = build(torch.float32, n_groups=1)
    with torch.no_grad():
        mixer.A_log.copy_(torch.linspace(1, 16, mixer.n_heads).log().to(torch.bfloat16))
    wide = build(torch.float64, n_groups=1)
    wide.load_state_dict(mixer.state_dict())
    u = torch.randn(1, 64, D)
    narrow_state = mixer(u, state=mixer.init_state(1))[1]["ssm"]["S"]
    wide_state = wide(u.double(), state=wide.init_state(1))[1]["ssm"]["S"]
    torch.testing.assert_close(narrow_state.double(), wide_state, rtol=1e-3, atol=1e-5)
    mixer.A_log.data = mixer.A_log.data.to(torch.bfloat16)
    rounded = mixer(u, state=mixer.init_state(1))[1]["ssm"]["S"]
    torch.testing.assert_close(rounded, narrow_state, rtol=1e-5, atol=1e-7)


@torch.no_grad()
def test_left_pads_do_not_enter_through_the_biases():
    mixer = build(bias=True)
    for p in (mixer.conv.bias, mixer.in_proj.bias):
        p.fill_(0.5)
    u = torch.randn(1, 6, D, dtype=torch.float64)
    padded = torch.cat([torch.full((1, 5, D), 7.0, dtype=torch.float64), u], 1)
    segments = Segments.from_mask((torch.arange(11) >= 5)[None])
    torch.testing.assert_close(mixer(padded, segments=segments)[0][:, 5:], mixer(u)[0], rtol=0, atol=1e-12)


def test_widths_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"expand \* d_model = 24 is not divisible by head_dim = 5"):
        build(head_dim=5)
    with pytest.raises(ConfigError, match="6 heads are not divisible by n_groups = 4"):
        build(n_groups=4)
    with pytest.raises(ConfigError, match="dt_range"):
        build(dt_range=(0.1, 0.01))
