from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import BuildContext, ConfigError, RecipeError
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import S4Config, S4DConfig
from hybridtf.nn import diagonal_hippo, hippo_legs
from hybridtf.nn.diagonal_ssm import diagonal_start
from tests.mixers.plain_parts import espnet_s4, given, same

D, F64 = 5, torch.float64


def espnet_layer(mixer, **options):
    """ESPnet's copy of the published layer, and its weights from ours."""
    theirs, ssm = espnet_s4().S4(D, mixer.config.d_state, transposed=False, **options), mixer.ssm
    weights = {
        "D": mixer.D[None], "output_linear.0.weight": mixer.out_proj.weight, "output_linear.0.bias": mixer.out_proj.bias,
        "kernel.kernel.log_dt": ssm.log_dt, "kernel.kernel.C": ssm.C[None],
    }
    return theirs, weights


@pytest.mark.parametrize("discretisation", ["zoh", "bilinear"])
@pytest.mark.parametrize("t", [2, 29])
def test_s4d_is_the_layer_of_espnet(t, discretisation):
    mixer, x = build(discretisation=discretisation), given(2, t, D)
    theirs, weights = espnet_layer(mixer, mode="diag", measure="diag-lin", disc=discretisation)
    one = torch.tensor([1.0, 0.0], dtype=F64).expand(D, 3, 2)
    inner = {"inv_A_real": mixer.ssm.log_A_real, "A_imag": mixer.ssm.A_imag, "B": one}
    weights |= {f"kernel.kernel.{name}": value for name, value in inner.items()}
    with StrictFloat64():
        want, _ = torch.func.functional_call(theirs, weights, x)
    same(mixer(x)[0], want, x, mixer)


class Stepped(torch.nn.Module):
    """Their layer token by token: the form that knows no length, and needs no extension. It is made for decoding: what turns
    gradients off around its set-up is taken away."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        kernel = self.layer.kernel.kernel
        kernel._setup_linear = functools.partial(type(kernel)._setup_linear.__wrapped__, kernel)
        self.layer.setup_step()
        state, out = self.layer.default_state(x.shape[0]), []
        for x_t in x.unbind(1):
            y, state = self.layer.step(x_t, state)
            out.append(y)
        return torch.stack(out, 1)


@pytest.mark.parametrize("t", [2, 29])
def test_s4_is_the_layer_of_espnet(t):
    mixer, x = build_s4(), given(2, t, D)
    theirs, weights = espnet_layer(mixer, mode="nplr", measure="legs")
    ssm = mixer.ssm
    inner = {"inv_w_real": ssm.log_A_real, "w_imag": ssm.A_imag, "B": ssm.B[None], "P": ssm.P[None]}
    weights |= {f"kernel.kernel.{name}": value for name, value in inner.items()}
    with StrictFloat64():
        layer = {f"layer.{name}": value for name, value in weights.items()}
        want = torch.func.functional_call(Stepped(theirs).eval(), layer, x)
    same(mixer(x)[0], want, x, mixer)


def build(nudge: float = 0.2, **options):
    mixer = S4DConfig(**{"d_state": 6, "chunk_size": 8, **options}).build(BuildContext(d_model=D, param_dtype=F64))
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(torch.randn(p.shape, dtype=F64) * nudge)
    return mixer


def kernel_of_the_paper(ssm, length: int):
    """K_l = 2 Re(sum_n C_n B_bar_n A_bar_n^l) as the paper has it for each discretisation: a Vandermonde product."""
    a = torch.complex(-ssm.log_A_real.exp(), ssm.A_imag)
    dt, c = ssm.log_dt.exp()[:, None], torch.view_as_complex(ssm.C)
    if ssm.discretisation == "zoh":
        bar, b = (dt * a).exp(), ((dt * a).exp() - 1) / a
    else:
        bar, b = (1 + dt * a / 2) / (1 - dt * a / 2), dt / (1 - dt * a / 2)
    return 2 * torch.einsum("cn,cnl->cl", c * b, bar[..., None] ** torch.arange(length)).real


def by_convolution(mixer, x):
    """The published layer: a convolution with that kernel by FFT, then D, gelu and the gated linear unit."""
    t = x.shape[1]
    kernel = torch.fft.rfft(kernel_of_the_paper(mixer.ssm, t), n=2 * t)
    y = torch.fft.irfft(torch.fft.rfft(x.mT, n=2 * t) * kernel, n=2 * t)[..., :t].mT
    return F.glu(mixer.out_proj(F.gelu(y + mixer.D * x)), -1)


@pytest.mark.parametrize("discretisation", ["zoh", "bilinear"])
@pytest.mark.parametrize("a_init", ["lin", "inv", "legs"])
def test_forward_and_gradients_are_those_of_the_convolution(a_init, discretisation):
    mixer = build(a_init=a_init, discretisation=discretisation)
    x = torch.randn(2, 29, D, dtype=F64, requires_grad=True)
    got, want = mixer(x)[0], by_convolution(mixer, x)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    weight, params = torch.randn_like(want), [x, *mixer.parameters()]
    ours, theirs = (torch.autograd.grad((y * weight).sum(), params) for y in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_a_held_input_is_sampled_exactly():
    """Zero-order hold: the continuous system under a staircase, solved by torch.linalg.matrix_exp of [[dt A, dt B], [0, 0]]."""
    mixer = build(d_state=4)
    ssm = mixer.ssm
    x = torch.randn(1, 17, D, dtype=F64)
    got = ssm(x, None, None)[0]
    for channel in range(D):
        a = torch.zeros(3, 3, dtype=torch.complex128)
        a[:2, :2] = torch.diag(torch.complex(-ssm.log_A_real[channel].exp(), ssm.A_imag[channel]))
        a[:2, 2] = 1
        step = torch.linalg.matrix_exp(a * ssm.log_dt[channel].exp())
        h, out = torch.zeros(2, dtype=torch.complex128), []
        for u in x[0, :, channel]:
            h = step[:2, :2] @ h + step[:2, 2] * u
            out.append(2 * (torch.view_as_complex(ssm.C[channel]) * h).sum().real)
        torch.testing.assert_close(got[0, :, channel], torch.stack(out), rtol=0, atol=1e-9)


def test_starts_where_the_paper_says():
    mixer = build(0.0, d_state=64)
    torch.testing.assert_close(mixer.ssm.log_A_real.exp(), torch.full((D, 32), 0.5, dtype=F64), rtol=1e-6, atol=0)
    torch.testing.assert_close(mixer.ssm.A_imag[2], math.pi * torch.arange(32, dtype=F64), rtol=1e-6, atol=0)
    n = 64
    want = [n / math.pi * (n / (2 * k + 1) - 1) for k in range(n // 2)]
    torch.testing.assert_close(diagonal_start("inv", 32)[1], torch.tensor(want, dtype=F64))
    dt = mixer.ssm.log_dt.detach().exp()
    assert 0.001 <= float(dt.min()) <= float(dt.max()) <= 0.1001


def test_hippo_is_rebuilt_from_its_diagonal_form():
    """V (Lambda - p p^*) V^* is A again, and its known values are those of the HiPPO paper."""
    n = 8
    a, b = hippo_legs(n)
    assert a[0].tolist() == [-1.0] + [0.0] * 7
    torch.testing.assert_close(a[2, :3], -torch.tensor([5**0.5, 15**0.5, 3.0], dtype=F64))
    torch.testing.assert_close(b, (2 * torch.arange(n, dtype=F64) + 1).sqrt())
    half = diagonal_hippo(n)
    assert bool((half.eigenvalues.real + 0.5).abs().max() < 1e-12)
    assert bool((half.eigenvalues.imag > 0).all())
    vectors = torch.cat([half.vectors, half.vectors.conj()], 1)
    p = torch.cat([half.low_rank, half.low_rank.conj()])
    values = torch.cat([half.eigenvalues, half.eigenvalues.conj()])
    again = vectors @ (torch.diag(values) - p[:, None] * p.conj()) @ vectors.mH
    torch.testing.assert_close(again, a.to(again.dtype), rtol=0, atol=1e-10)
    torch.testing.assert_close(vectors @ torch.cat([half.b, half.b.conj()]), b.to(again.dtype), rtol=0, atol=1e-10)


def test_a_step_at_the_pole_of_the_bilinear_form_is_finite():
    """dt A = -2: A_bar is 0."""
    mixer = build(0.0, discretisation="bilinear")
    with torch.no_grad():
        mixer.ssm.log_A_real.fill_(math.log(2.0))
        mixer.ssm.A_imag.fill_(1e-3)
        mixer.ssm.log_dt.fill_(0.0)
    x = torch.randn(1, 20, D, dtype=F64, requires_grad=True)
    y = mixer(x)[0]
    torch.testing.assert_close(y, by_convolution(mixer, x), rtol=0, atol=1e-9)
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), [x, *mixer.parameters()]))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="d_state = 5 must be even"):
        build(d_state=5)
    with pytest.raises(RecipeError, match="dt_range"):
        S4DConfig(dt_range=(0.1, 0.01))


def build_s4(nudge: float = 0.2, **options):
    mixer = S4Config(**{"d_state": 6, "chunk_size": 8, **options}).build(BuildContext(d_model=D, param_dtype=F64))
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(torch.randn(p.shape, dtype=F64) * nudge)
    return mixer


def both_halves(ssm):
    """A (d n n), B and C (d n) over all states: conjugate pairs as two states each, complex."""
    half = torch.complex(-ssm.log_A_real.exp(), ssm.A_imag)
    p, b, c = (torch.view_as_complex(x) for x in (ssm.P, ssm.B, ssm.C))
    values, p, b, c = (torch.cat([x, x.conj()], 1) for x in (half, p, b, c))
    return torch.diag_embed(values) - p[:, :, None] * p[:, None, :].conj(), b, c


def simulated(mixer, x):
    """The paper's section 2.3 on whole complex matrices with torch.linalg.solve, one token after another."""
    a, b, c = both_halves(mixer.ssm)
    dt = mixer.ssm.log_dt.exp()[:, None, None]
    one = torch.eye(a.shape[-1], dtype=a.dtype)
    a_bar = torch.linalg.solve(one - dt / 2 * a, one + dt / 2 * a)
    b_bar = torch.linalg.solve(one - dt / 2 * a, (dt * b[..., None]))[..., 0]
    h, out = torch.zeros(x.shape[0], *b.shape, dtype=a.dtype), []
    for x_t in x.to(a.dtype).unbind(1):
        h = torch.einsum("cnm,bcm->bcn", a_bar, h) + b_bar * x_t[..., None]
        out.append((h * c).sum(-1).real + mixer.D * x_t.real)
    return F.glu(mixer.out_proj(F.gelu(torch.stack(out, 1))), -1)


def test_s4_forward_and_gradients_are_those_of_the_dense_simulation():
    mixer = build_s4()
    x = torch.randn(2, 29, D, dtype=F64, requires_grad=True)
    got, want = mixer(x)[0], simulated(mixer, x)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    weight, params = torch.randn_like(want), [x, *mixer.parameters()]
    ours, theirs = (torch.autograd.grad((y * weight).sum(), params) for y in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_s4_equals_the_generating_function_of_its_kernel():
    """The paper's theorem 3: the kernel of length l from its generating function at the roots of unity, by Cauchy products and
    Woodbury's identity over all states, with C (I - A_bar^l)."""
    mixer, t = build_s4(), 16
    ssm, (a, b, c) = mixer.ssm, both_halves(mixer.ssm)
    half = torch.complex(-ssm.log_A_real.exp(), ssm.A_imag)
    p = torch.view_as_complex(ssm.P)
    values, p = torch.cat([half, half.conj()], 1), torch.cat([p, p.conj()], 1)
    dt, one = ssm.log_dt.exp()[:, None, None], torch.eye(a.shape[-1], dtype=a.dtype)
    a_bar = torch.linalg.solve(one - dt / 2 * a, one + dt / 2 * a)
    cut = torch.einsum("cn,cnm->cm", c, one - torch.linalg.matrix_power(a_bar, t))
    z = torch.exp(-2j * torch.pi * torch.arange(t, dtype=F64) / t).to(a.dtype)
    g = 2 / dt * ((1 - z) / (1 + z))[None, :, None]  # at z = -1 the next line is its limit
    keep = (z + 1).abs() > 1e-9
    cauchy = lambda x, y: (x[:, None] * y[:, None] / (g - values[:, None])).sum(-1)  # noqa: E731
    k = cauchy(cut, b) - cauchy(cut, p) * cauchy(p.conj(), b) / (1 + cauchy(p.conj(), p))
    at_roots = 2 / (1 + z) * k
    ours = torch.zeros(1, t, D, dtype=F64)
    ours[0, 0] = 1
    kernel = ssm(ours, None, None)[0][0]  # the answer to one impulse
    found = torch.fft.fft(kernel.to(a.dtype), dim=0).mT
    torch.testing.assert_close(found[:, keep], at_roots[:, keep], rtol=1e-9, atol=1e-9)


def test_s4_starts_as_hippo_and_never_grows():
    """In real coordinates A_bar has the eigenvalues of the discretised HiPPO matrix, and norm at most 1."""
    n = 8
    mixer = S4Config(d_state=n).build(BuildContext(d_model=D, param_dtype=F64))
    bar = mixer.ssm.system(F64)[0].detach()
    a, _ = hippo_legs(n)
    for channel in range(D):
        dt = mixer.ssm.log_dt[channel].detach().exp()
        # HiPPO's matrix is triangular: its eigenvalues are those on the diagonal.
        want = (1 + dt / 2 * a.diagonal()) / (1 - dt / 2 * a.diagonal())
        found = torch.linalg.eigvals(bar[channel])
        torch.testing.assert_close(found.real.sort().values, want.sort().values, rtol=0, atol=1e-3)
    assert float(torch.linalg.matrix_norm(build_s4().ssm.system(F64)[0].detach(), 2).max()) <= 1 + 1e-12


def test_s4_refuses_an_odd_state_and_a_chunk_that_is_no_power_of_2():
    with pytest.raises(ConfigError, match="d_state = 5 must be even"):
        build_s4(d_state=5)
    with pytest.raises(RecipeError, match="chunk_size: 6 must be a power of 2"):
        S4Config(chunk_size=6)
