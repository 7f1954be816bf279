"""The two recurrences with one complex state: against dense simulation of the whole system."""

from __future__ import annotations

import math

import pytest
import torch

from hybridtf.core import BuildContext, RecipeError
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import LRUConfig, S5Config
from hybridtf.nn import diagonal_hippo, hippo_legs
from tests.mixers.plain_parts import given, same
from tests.peers import peer

D, F64 = 5, torch.float64


def nudged(mixer, size: float = 0.2):
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(torch.randn(p.shape, dtype=F64) * size)
    return mixer


def lru(**options):
    config = LRUConfig(**{"d_state": 6, "r_range": (0.3, 0.95), **options})
    return nudged(config.build(BuildContext(d_model=D, param_dtype=F64)))


def s5(**options):
    config = S5Config(**{"d_state": 12, "n_blocks": 2, "dt_range": (0.01, 0.3), **options})
    return nudged(config.build(BuildContext(d_model=D, param_dtype=F64)))


def simulate(a, b, c, d, x):
    """x (b t d) through h = A h + B x, y = C h + D x with whole complex matrices, one step after another."""
    h, out = torch.zeros(x.shape[0], a.shape[0], dtype=a.dtype), []
    for x_t in x.to(a.dtype).unbind(1):
        h = h @ a.mT + x_t @ b.mT
        out.append((h @ c.mT).real + d * x_t.real)
    return torch.stack(out, 1)


def lru_system(mixer):
    """The paper's appendix A: A, B and C of the LRU."""
    nu_log, theta_log, gamma_log = mixer.polar
    lam = torch.exp(torch.complex(-nu_log.exp(), theta_log.exp()))
    b = torch.complex(mixer.B_re, mixer.B_im) * gamma_log.exp()[:, None]
    return torch.diag(lam), b, torch.complex(mixer.C_re, mixer.C_im)


def s5_system(mixer):
    """Both halves of the conjugate pairs, discretised as whole matrices: matrix_exp and solve, or the bilinear transform."""
    re = mixer.Lambda_re.clamp(max=-1e-4) if mixer.config.clip_eigenvalues else mixer.Lambda_re
    half = torch.complex(re, mixer.Lambda_im)
    a = torch.diag(torch.cat([half, half.conj()]))
    b, c = (torch.complex(p[0], p[1]) for p in (mixer.B, mixer.C))
    b, c = torch.cat([b, b.conj()]), torch.cat([c, c.conj()], 1)
    dt, one = torch.diag(mixer.log_step.exp().repeat(2)).to(a.dtype), torch.eye(len(a), dtype=a.dtype)
    if mixer.config.discretisation == "zoh":
        bar = torch.linalg.matrix_exp(dt @ a)
        return bar, torch.linalg.solve(a, (bar - one) @ b), c
    below = one - dt @ a / 2
    return torch.linalg.solve(below, one + dt @ a / 2), torch.linalg.solve(below, dt @ b), c


CASES = [
    (lru, lru_system, {}), (lru, lru_system, {"d_state": None, "max_phase": 0.3}),
    (s5, s5_system, {}), (s5, s5_system, {"discretisation": "bilinear", "n_blocks": 1}),
    (s5, s5_system, {"clip_eigenvalues": True}),
]


@pytest.mark.parametrize(("build", "system", "options"), CASES)
def test_forward_and_gradients_are_those_of_the_whole_system(build, system, options):
    mixer = build(**options)
    x = torch.randn(2, 23, D, dtype=F64, requires_grad=True)
    got, want = mixer(x)[0], simulate(*system(mixer), mixer.D, x)
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)
    weight, params = torch.randn_like(want), [x, *mixer.parameters()]
    ours, theirs = (torch.autograd.grad((y * weight).sum(), params) for y in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("t", [2, 29])
def test_the_lru_of_lru_pytorch(t):
    """Its D is a matrix over channels: ours is the paper's, a diagonal. Its first token of a row starts from zero."""
    mixer, x = lru(), given(2, t, D)
    theirs = peer("LRU_pytorch.LRU").LRU(D, D, mixer.config.d_state)
    nu_log, theta_log, gamma_log = mixer.polar
    weights = {
        "nu_log": nu_log, "theta_log": theta_log, "gamma_log": gamma_log, "D": torch.diag(mixer.D),
        "B": torch.complex(mixer.B_re, mixer.B_im), "C": torch.complex(mixer.C_re, mixer.C_im),
    }
    theirs.state = theirs.state.to(torch.complex128)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *shape, **_: torch.zeros(*shape, dtype=F64))  # what its outputs are written into
        want = torch.func.functional_call(theirs, weights, x)
    same(mixer(x)[0], want, x, mixer)


@pytest.mark.parametrize("discretisation", ["zoh", "bilinear"])
@pytest.mark.parametrize("t", [2, 29])
def test_the_s5_of_s5_pytorch(discretisation, t):
    """Its states are both halves of the conjugate pairs, its scan an associative one."""
    mixer, x = s5(discretisation=discretisation), given(2, t, D)
    p = 2 * len(mixer.log_step)
    eye = torch.eye(p, dtype=torch.complex64)
    s5_ssm = peer("s5.s5_model", scipy={}, scipy__linalg={}).S5SSM
    theirs = s5_ssm(torch.zeros(p), eye, eye, D, p, 0.01, 0.1, discretization=discretisation, bcInit="dense")
    half, c = torch.complex(mixer.Lambda_re, mixer.Lambda_im), torch.complex(mixer.C[0], mixer.C[1])
    b = mixer.B.permute(1, 2, 0)  # re and im last
    weights = {
        "Lambda": torch.cat([half, half.conj()]), "B": torch.cat([b, b * b.new_tensor([1, -1])]),
        "C": torch.cat([c, c.conj()], 1), "D": mixer.D, "log_step": mixer.log_step.repeat(2),
    }
    with StrictFloat64():
        want = torch.stack([torch.func.functional_call(theirs, weights, row) for row in x])
    same(mixer(x)[0], want, x, mixer)


def test_the_lru_starts_even_over_the_ring_and_normalised():
    polar = LRUConfig(d_state=20_000, r_range=(0.4, 0.9), max_phase=1.0).build(BuildContext(d_model=1)).polar.detach().double()
    size = (-polar[0].exp()).exp()
    assert 0.4 <= float(size.min()) <= float(size.max()) <= 0.9
    inside = float((size < 0.7).double().mean())  # areas, not radii
    assert inside == pytest.approx((0.7**2 - 0.4**2) / (0.9**2 - 0.4**2), abs=0.02)
    assert float(polar[1].exp().mean()) == pytest.approx(0.5, abs=0.02)
    torch.testing.assert_close(polar[2].exp(), (1 - size**2).sqrt(), rtol=1e-4, atol=1e-6)


def test_the_lru_keeps_the_size_of_white_noise():
    """What gamma is for (the paper's section 3.4): E |h|^2 = |B x|^2, whatever lambda is."""
    mixer = LRUConfig(d_state=64, r_range=(0.5, 0.99)).build(BuildContext(d_model=64, param_dtype=F64))
    x = torch.randn(1, 6000, 64, dtype=F64)
    with torch.no_grad():
        lam, b, _ = lru_system(mixer)
        h, total = torch.zeros(64, dtype=lam.dtype), torch.zeros(64, dtype=F64)
        inputs = x[0].to(lam.dtype) @ b.mT
        for u in inputs:
            h = lam.diagonal() * h + u
            total = total + h.abs().square()
    assert float((total / len(inputs)).mean()) == pytest.approx(1.0, abs=0.1)


def test_the_lru_over_the_whole_disc_is_finite():
    mixer = LRUConfig().build(BuildContext(d_model=300))
    assert mixer.polar.isfinite().all()
    assert mixer(torch.randn(1, 50, 300))[0].isfinite().all()


def test_s5_starts_from_hippo():
    """In the eigenvectors of the normal part of HiPPO-LegS, blocks side by side, B real and C B as drawn."""
    mixer = S5Config(d_state=16, n_blocks=2).build(BuildContext(d_model=3, param_dtype=F64))
    a, _ = hippo_legs(8)
    p = (torch.arange(8, dtype=F64) + 0.5).sqrt()
    values = torch.linalg.eigvals(a + p[:, None] * p)
    want = values[values.imag > 0]
    want = want[want.imag.argsort()].repeat(2)
    torch.testing.assert_close(torch.complex(mixer.Lambda_re, mixer.Lambda_im).detach(), want, rtol=1e-5, atol=1e-5)
    half = diagonal_hippo(8).vectors
    for block in torch.complex(mixer.B[0], mixer.B[1]).detach().unflatten(0, (2, 4)):
        drawn = 2 * (half @ block).real  # V V^* B: both halves of the pairs
        torch.testing.assert_close(half.mH @ drawn.to(half.dtype), block, rtol=1e-5, atol=1e-5)
    dt = mixer.log_step.detach().exp()
    assert 0.001 <= float(dt.min()) <= float(dt.max()) <= 0.1001


def test_clipped_eigenvalues_cannot_grow():
    mixer = s5(clip_eigenvalues=True)
    with torch.no_grad():
        mixer.Lambda_re.fill_(0.5)
    y = mixer(torch.ones(1, 4000, D, dtype=F64))[0]
    assert float(y.detach().abs().max()) < 1e4
    assert math.isfinite(float(y.detach().sum()))


def test_what_does_not_fit_is_refused():
    with pytest.raises(RecipeError, match="d_state = 10 is no multiple of 2 n_blocks = 8"):
        S5Config(d_state=10, n_blocks=4)
    with pytest.raises(RecipeError, match="r_range"):
        LRUConfig(r_range=(0.5, 1.5))
    with pytest.raises(RecipeError, match="dt_range"):
        S5Config(dt_range=(0.0, 0.1))
