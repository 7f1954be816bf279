from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import BuildContext, RecipeError
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import EMAConfig
from tests.mixers.plain_parts import given, same
from tests.peers import peer

D, F64 = 5, torch.float64


def build(d_state: int = 4):
    mixer = EMAConfig(d_state=d_state, chunk_size=8).build(BuildContext(d_model=D, param_dtype=F64))
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(torch.randn(p.shape, dtype=F64) * 0.3)
    return mixer


def by_the_paper(mixer, x):
    """Equations 6 to 9 of Mega as one dense sum over the past, and its gate."""
    p, q = mixer.delta.sigmoid(), 1 - mixer.delta.sigmoid() * mixer.alpha.sigmoid()
    t = x.shape[1]
    ago = torch.arange(t)[:, None] - torch.arange(t)
    powers = q[..., None, None] ** ago.clamp(min=0) * (ago >= 0)
    kernel = torch.einsum("dn,dnij->dij", mixer.gamma * p * mixer.beta, powers) / mixer.config.d_state**0.5
    m = F.silu(torch.einsum("dij,bjd->bid", kernel, x) + mixer.omega * x)
    return mixer.out_proj(F.silu(mixer.gate_proj(m)) * m)


def test_forward_and_gradients_are_those_of_the_paper():
    mixer = build()
    x = torch.randn(2, 29, D, dtype=F64, requires_grad=True)
    got, want = mixer(x)[0], by_the_paper(mixer, x)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    weight, params = torch.randn_like(want), [x, *mixer.parameters()]
    ours, theirs = (torch.autograd.grad((y * weight).sum(), params) for y in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("t", [2, 29])
def test_the_damped_average_of_espnet(t):
    """ESPnet's module, after Mega's own code, is m; Mega's gate around it is spelled out."""
    mixer, x = build(), given(2, t, D)
    module = peer("espnet2/asr_transducer/decoder/modules/mega/multi_head_damped_ema.py").MultiHeadDampedEMA
    theirs = module(D, mixer.config.d_state, activation=torch.nn.SiLU())
    weights = {
        "damping_factor": mixer.delta[..., None], "decay_factor": mixer.alpha[..., None],
        "ema_expansion_matrix": mixer.beta[..., None], "kernel_projection_matrix": mixer.gamma, "residual_weight": mixer.omega,
    }
    with StrictFloat64():
        m = torch.func.functional_call(theirs, weights, x.transpose(0, 1))[0].transpose(0, 1)
    same(mixer(x)[0], mixer.out_proj(F.silu(mixer.gate_proj(m)) * m), x, mixer)


def test_undamped_it_is_the_plain_moving_average():
    """With alpha at its limit q is 1 - p: the average moves a share p of the way to each input."""
    mixer = build(d_state=1)
    with torch.no_grad():
        mixer.alpha.fill_(60.0)
        mixer.beta.fill_(1.0)
        mixer.gamma.fill_(1.0)
        mixer.omega.zero_()
    x = torch.randn(1, 12, D, dtype=F64)
    p, average, out = mixer.delta.sigmoid()[:, 0], torch.zeros(D, dtype=F64), []
    for x_t in x[0]:
        average = average + p * (x_t - average)
        out.append(average)
    m = F.silu(torch.stack(out))
    torch.testing.assert_close(mixer(x)[0][0], mixer.out_proj(F.silu(mixer.gate_proj(m)) * m), rtol=0, atol=1e-12)


def test_forgetting_everything_is_finite():
    mixer = EMAConfig().build(BuildContext(d_model=D))
    with torch.no_grad():
        mixer.alpha.fill_(100.0)
        mixer.delta.fill_(100.0)
    x = torch.randn(1, 200, D, requires_grad=True)
    y = mixer(x)[0]
    assert y.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), [x, *mixer.parameters()]))


def test_starts_by_cancelling():
    beta = EMAConfig().build(BuildContext(d_model=64)).beta.detach()
    torch.testing.assert_close(beta.mean(0), torch.tensor([1.0, -1.0] * 8), rtol=0, atol=0.02)


def test_a_chunk_that_is_no_power_of_2_is_refused():
    with pytest.raises(RecipeError, match="chunk_size: 12 must be a power of 2"):
        EMAConfig(chunk_size=12)
