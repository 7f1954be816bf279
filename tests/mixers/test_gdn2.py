"""Gated DeltaNet-2 against fla's loop, the rest of the layer written with torch's own functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import ConfigError
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import GDN2Config
from tests.mixers.plain_parts import built, causal_conv, given, same
from tests.peers import peer

WIDTH = 7


def plain(m, x):
    config, groups = m.config, m.config.value_heads // m.config.n_heads
    keys = lambda z: z.unflatten(-1, (config.n_heads, -1)).repeat_interleave(groups, 2)  # noqa: E731
    values = lambda z: z.unflatten(-1, (m.config.value_heads, -1))  # noqa: E731
    parts = (("q", m.q_proj), ("k", m.k_proj), ("v", m.v_proj))
    q, k, v = (causal_conv(proj(x), m.conv.get_submodule(name)) for name, proj in parts)
    q, k = (keys(z) for z in (q, k))
    q, k = (z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt() for z in (q, k))
    low = lambda part: part.up_proj(part.down_proj(x))  # noqa: E731
    rate = m.A_log.exp().repeat_interleave(config.head_dim)
    log_a = keys(-rate * torch.log1p(torch.exp(low(m.decay_proj) + m.dt_bias)))
    erase = keys(torch.sigmoid(m.b_proj(x))) * (2.0 if config.allow_neg_eigval else 1.0)
    with StrictFloat64():
        y, _ = peer("fla/ops/gdn2/naive.py").naive_recurrent_gdn2(
            q, k, values(v), log_a, erase, values(torch.sigmoid(m.w_proj(x)))
        )
    y = F.rms_norm(y, y.shape[-1:], m.norm.weight, config.eps) * torch.sigmoid(values(low(m.gate_proj)))
    return m.out_proj(y.flatten(-2))


@pytest.mark.parametrize(
    "options",
    [
        {}, {"n_v_heads": 4, "allow_neg_eigval": True},
        {"conv_bias": True, "d_conv": 3, "v_dim": 5, "a_range": (200.0, 300.0)},
    ],
)
@pytest.mark.parametrize("t", [2, 21])
def test_against_the_loop_of_fla(t: int, options: dict) -> None:
    config = GDN2Config(**{"n_heads": 2, "head_dim": 4, "v_dim": 3, "chunk_size": 8, **options})
    mixer, x = built(config, WIDTH), given(2, t, WIDTH)
    same(mixer(x)[0], plain(mixer, x), x, mixer, tol=1e-8)


def test_options_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="n_v_heads = 3 is not a multiple of n_heads = 2"):
        GDN2Config(n_heads=2, n_v_heads=3)
