from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import BuildContext, ConfigError, RecipeError
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import H3Config
from tests.mixers.plain_parts import espnet_s4, given, same

D, F64 = 6, torch.float64


def build(**options):
    mixer = H3Config(**{"d_state": 4, "chunk_size": 8, **options}).build(BuildContext(d_model=D, param_dtype=F64))
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(torch.randn(p.shape, dtype=F64) * 0.2)
    return mixer


def toeplitz(kernel):
    """(c t) to (c t t): a causal convolution as a matrix."""
    t = kernel.shape[1]
    ago = torch.arange(t)[:, None] - torch.arange(t)
    return kernel[:, ago.clamp(min=0)] * (ago >= 0)


def by_matrices(mixer, x):
    """Algorithm 1 with both state-space models as dense matrices over time: the shift by powers of the shift matrix, the
    diagonal one by its Vandermonde product."""
    t, n, e = x.shape[1], mixer.config.d_state, mixer.config.head_dim
    q, k, v = mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)
    move, first = torch.diag(torch.ones(n - 1, dtype=F64), -1), torch.eye(n, dtype=F64)[0]
    c = mixer.shift.weight.flip(1)  # the newest input first
    taps = torch.stack([c @ torch.linalg.matrix_power(move, i) @ first for i in range(t)], 1)
    k = torch.einsum("cij,bjc->bic", toeplitz(taps), k) + mixer.shift_D * k
    a = torch.complex(-mixer.ssm.log_A_real.exp(), mixer.ssm.A_imag)
    dt, c = mixer.ssm.log_dt.exp()[:, None], torch.view_as_complex(mixer.ssm.C)
    if mixer.config.discretisation == "bilinear":
        bar, b = (1 + dt * a / 2) / (1 - dt * a / 2), dt / (1 - dt * a / 2)
    else:
        bar, b = (dt * a).exp(), ((dt * a).exp() - 1) / a
    kernel = 2 * torch.einsum("hn,hnl->hl", c * b, bar[..., None] ** torch.arange(t)).real
    out = []
    for head in range(D // e):
        part = slice(head * e, head * e + e)
        products = k[..., part, None] * v[..., None, part]
        kept = torch.einsum("ij,bjef->bief", toeplitz(kernel)[head], products) + mixer.D[head] * products
        out.append(torch.einsum("bief,bie->bif", kept, q[..., part]))
    return mixer.out_proj(torch.stack(out, -1).flatten(2))


@pytest.mark.parametrize("options", [{}, {"head_dim": 3}, {"head_dim": 2, "discretisation": "zoh", "a_init": "inv"}])
def test_forward_and_gradients_are_those_of_algorithm_1(options):
    mixer = build(**options)
    x = torch.randn(2, 21, D, dtype=F64, requires_grad=True)
    got, want = mixer(x)[0], by_matrices(mixer, x)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    weight, params = torch.randn_like(want), [x, *mixer.parameters()]
    ours, theirs = (torch.autograd.grad((y * weight).sum(), params) for y in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("options", [{"head_dim": 1}, {"head_dim": 3}, {"head_dim": 2, "discretisation": "zoh"}])
@pytest.mark.parametrize("t", [2, 23])
def test_the_diagonal_model_is_that_of_espnet_and_the_shift_a_convolution_of_torch(t, options):
    """Algorithm 1 around the kernel that ESPnet's S4D gives."""
    mixer, x = build(**options), given(2, t, D)
    ssm, e, n = mixer.ssm, mixer.config.head_dim, 2 * t
    one = torch.ones(D // e, 2, dtype=torch.complex64)
    theirs = espnet_s4().SSKernelDiag(-one, one, one[None], torch.zeros(D // e), disc=mixer.config.discretisation)
    weights = {"log_dt": ssm.log_dt, "inv_A_real": ssm.log_A_real, "A_imag": ssm.A_imag, "C": ssm.C[None]}
    with StrictFloat64():
        kernel, _ = torch.func.functional_call(theirs, weights, (t,))
    k = mixer.k_proj(x)
    k = F.conv1d(F.pad(k.mT, (mixer.config.d_state - 1, 0)), mixer.shift.weight[:, None], groups=D).mT + mixer.shift_D * k
    q, k, v = (z.unflatten(-1, (-1, e)).movedim(1, -1) for z in (mixer.q_proj(x), k, mixer.v_proj(x)))  # [b, h, e, t]
    products = k[:, :, :, None] * v[:, :, None]
    kept = torch.fft.irfft(torch.fft.rfft(products, n=n) * torch.fft.rfft(kernel[0], n=n)[:, None, None], n=n)[..., :t]
    kept = kept + mixer.D[:, None, None, None] * products
    y = torch.einsum("bheft,bhet->btfh", kept, q).flatten(2)
    same(mixer(x)[0], mixer.out_proj(y), x, mixer)


def test_the_shift_alone_is_a_convolution_of_torch():
    mixer = build()
    k = torch.randn(2, 9, D, dtype=F64)
    want = F.conv1d(F.pad(k.mT, (3, 0)), mixer.shift.weight[:, None], groups=D).mT
    torch.testing.assert_close(mixer.shift(k, None, None)[0], want, rtol=0, atol=1e-12)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="d_model = 6 is not divisible by head_dim = 4"):
        build(head_dim=4)
    with pytest.raises(ConfigError, match="d_state = 3 must be even"):
        build(d_state=3)
    with pytest.raises(RecipeError, match="chunk_size: 12 must be a power of 2"):
        H3Config(chunk_size=12)
    with pytest.raises(RecipeError, match="dt_range"):
        H3Config(dt_range=(0.1, 0.01))
