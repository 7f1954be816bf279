from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import BuildContext, ConfigError
from hybridtf.mixers import MinGRUConfig, MinLSTMConfig
from tests.mixers.plain_parts import given, same
from tests.peers import peer

D, F64 = 7, torch.float64
KINDS = [MinGRUConfig, MinLSTMConfig]


def build(cls, **options):
    mixer = cls(expand=1.6, **options).build(BuildContext(d_model=D, param_dtype=F64))
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(torch.randn(p.shape, dtype=F64) * 0.3)
    return mixer


def log_gates(mixer, x):
    """log of the factor and of the weight of the write, by the paper's log-space formulas (its appendix B)."""
    if isinstance(mixer.config, MinGRUConfig):
        k = mixer.z_proj(x)
        return -F.softplus(k), -F.softplus(-k)
    difference = F.softplus(-mixer.f_proj(x)) - F.softplus(-mixer.i_proj(x))
    return -F.softplus(difference), -F.softplus(-difference)


def in_log_space(mixer, x):
    """The paper's parallel scan: h_t = exp(a*_t + logcumsumexp(log v - a*)), with a* the sum of the log factors so far."""
    log_a, log_w = log_gates(mixer, x)
    v = mixer.h_proj(x)
    log_g = torch.where(v >= 0, (F.relu(v) + 0.5).log(), -F.softplus(-v))
    total = log_a.cumsum(1)
    return mixer.out_proj((total + torch.logcumsumexp(log_w + log_g - total, 1)).exp())


def step_by_step(mixer, x):
    """The paper's sequential form, gates as they stand there."""
    h, out = torch.zeros(x.shape[0], mixer.width, dtype=x.dtype), []
    for x_t in x.unbind(1):
        new = mixer.h_proj(x_t)
        if mixer.config.positive:
            new = torch.where(new >= 0, new + 0.5, new.sigmoid())
        if isinstance(mixer.config, MinGRUConfig):
            z = mixer.z_proj(x_t).sigmoid()
            h = (1 - z) * h + z * new
        else:
            f, i = mixer.f_proj(x_t).sigmoid(), mixer.i_proj(x_t).sigmoid()
            h = f / (f + i) * h + i / (f + i) * new
        out.append(h)
    return mixer.out_proj(torch.stack(out, 1))


@pytest.mark.parametrize("cls", KINDS)
@pytest.mark.parametrize(("form", "options"), [(in_log_space, {}), (step_by_step, {}), (step_by_step, {"positive": False})])
def test_forward_and_gradients_are_those_of_the_paper(cls, form, options):
    mixer = build(cls, **options)
    x = torch.randn(2, 13, D, dtype=F64, requires_grad=True)
    weight = torch.randn(2, 13, D, dtype=F64)
    got, want = mixer(x)[0], form(mixer, x)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    params = [x, *mixer.parameters()]
    ours, theirs = (torch.autograd.grad((y * weight).sum(), params) for y in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("cls", "name"), [(MinGRUConfig, "minGRU"), (MinLSTMConfig, "minLSTM")])
@pytest.mark.parametrize("t", [1, 2, 37])
def test_against_the_layers_of_mingru_pytorch(cls, name, t):
    """One matrix there for candidate and gates, and no biases."""
    mixer, x = build(cls, bias=False), given(2, t, D)
    theirs = getattr(peer(f"minGRU_pytorch.{name}"), name)(D, expansion_factor=mixer.width / D, proj_out=True)
    parts = (mixer.h_proj, mixer.z_proj) if name == "minGRU" else (mixer.h_proj, mixer.f_proj, mixer.i_proj)
    wide = next(key for key, _ in theirs.named_parameters() if key != "to_out.weight")
    weights = {wide: torch.cat([proj.weight for proj in parts]), "to_out.weight": mixer.out_proj.weight}
    same(mixer(x)[0], torch.func.functional_call(theirs, weights, x), x, mixer)


@pytest.mark.parametrize("cls", KINDS)
def test_gates_far_from_zero_stay_finite(cls):
    """Gates of exactly 0 and 1 in float32, long inputs."""
    mixer = cls().build(BuildContext(d_model=D))
    x = torch.randn(1, 3000, D, requires_grad=True)
    with torch.no_grad():
        for p in mixer.parameters():
            p.mul_(200)
    y = mixer(x)[0]
    assert y.isfinite().all()
    (grad,) = torch.autograd.grad(y.square().mean(), x)
    assert grad.isfinite().all()


def test_no_channels_are_refused():
    with pytest.raises(ConfigError, match=r"expand \* d_model = 0.07"):
        MinGRUConfig(expand=0.01).build(BuildContext(d_model=D))
