"""Comba against fla's chunked reference, the rest of the layer written with torch's own functions.

fla's two references disagree. The chunked one reads the state before it decays, (a - b k k^T) S, which is the paper's scalar
plus low rank; the loop after it, (1 - b k k^T) a S, which is the gated delta rule. The paper decides. In fla's layer the
queries are made 1 long after their correction and the weakened keys 1 long again, which undoes the weakening: here, as in the
paper, lengths come first.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import ConfigError
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import CombaConfig
from hybridtf.ops.dplr import dplr_reference
from tests.mixers.plain_parts import built, causal_conv, given, same
from tests.peers import peer

WIDTH = 7


def plain(m, x):
    heads = lambda z: z.unflatten(-1, (m.config.n_heads, -1))  # noqa: E731
    parts = (("q", m.q_proj), ("k", m.k_proj), ("v", m.v_proj))
    q, k, v = (heads(causal_conv(proj(x), m.conv.get_submodule(name))) for name, proj in parts)
    q, k = (z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt() for z in (q, k))
    p = k if m.decay is None else k * torch.sigmoid(m.decay)[:, None]
    q = q if m.D is None else q - m.D[:, None] * k
    log_a = -m.A_log.exp() * torch.log1p(torch.exp(m.a_proj(x) + m.dt_bias))
    with StrictFloat64():
        y, _ = peer("fla/ops/comba/naive.py").naive_chunk_comba(
            q, k, v, p, log_a, torch.sigmoid(m.b_proj(x)), chunk_size=8
        )
    y = F.rms_norm(y, y.shape[-1:], m.norm.weight, m.config.eps) * torch.sigmoid(heads(m.gate_proj(x)))
    return m.out_proj(y.flatten(-2))


@pytest.mark.parametrize(
    "options", [{}, {"feedback_decay": False, "conv_bias": True}, {"output_correction": False, "d_conv": 3, "v_dim": 5}]
)
@pytest.mark.parametrize("t", [2, 21])
def test_against_the_chunks_of_fla(t: int, options: dict) -> None:
    config = CombaConfig(**{"n_heads": 2, "head_dim": 4, "v_dim": 3, "chunk_size": 4, **options})
    mixer, x = built(config, WIDTH), given(2, t, WIDTH)
    same(mixer(x)[0], plain(mixer, x), x, mixer, tol=1e-8)


def test_the_loop_of_fla_is_the_gated_delta_rule() -> None:
    """It agrees with the op where what is read has decayed too, and not with the paper's recurrence."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, 3, 4, generator=gen, dtype=torch.float64) for _ in range(3))
    k = F.normalize(k, dim=-1)
    beta = torch.rand(2, 9, 3, generator=gen, dtype=torch.float64)
    log_a = -torch.rand(2, 9, 3, generator=gen, dtype=torch.float64)
    with StrictFloat64():
        y, _ = peer("fla/ops/comba/naive.py").naive_recurrent_comba(q, k, v, k, beta, log_a)
    u, write = -beta[..., None] * k, beta[..., None] * k
    after, _ = dplr_reference(q / 2, write, v, log_a[..., None], u, k * log_a.exp()[..., None])
    before, _ = dplr_reference(q / 2, write, v, log_a[..., None], u, k)
    torch.testing.assert_close(y, after)
    assert float((y - before).abs().max()) > 0.1


def test_options_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="a_range"):
        CombaConfig(a_range=(2.0, 1.0))
