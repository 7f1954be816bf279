from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import BuildContext
from hybridtf.nn import GatedRMSNorm, LayerNormConfig, RMSNormConfig

CTX = BuildContext(d_model=12, param_dtype=torch.float64)


def randomised(module):
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(torch.rand(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype) + 0.5)
    return module


def test_rms_norm_is_torchs():
    norm = randomised(RMSNormConfig(eps=1e-5).build(CTX))
    x = torch.randn(3, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (12,), norm.weight, 1e-5))


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_is_torchs(bias):
    norm = randomised(LayerNormConfig(bias=bias).build(CTX))
    x = torch.randn(3, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (12,), norm.weight, norm.bias, 1e-5))


@pytest.mark.parametrize("norm_first", [True, False])
def test_gated_norm_over_groups(norm_first):
    norm = randomised(GatedRMSNorm(CTX, n_groups=3, eps=1e-5, norm_first=norm_first))
    y, z = torch.randn(2, 7, 12, dtype=torch.float64), torch.randn(2, 7, 12, dtype=torch.float64)
    inner = y if norm_first else y * F.silu(z)
    want = torch.cat([F.rms_norm(part, (4,), None, 1e-5) for part in inner.split(4, -1)], -1) * norm.weight
    torch.testing.assert_close(norm(y, z), want * F.silu(z) if norm_first else want)


@pytest.mark.parametrize("config", [RMSNormConfig(), LayerNormConfig()])
def test_zero_rows_have_finite_gradients(config):
    norm = config.build(CTX)
    x = torch.zeros(2, 12, dtype=torch.float64, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("config", [RMSNormConfig(), LayerNormConfig()])
def test_computes_in_float32_and_returns_its_dtype(config):
    norm = config.build(BuildContext(d_model=256)).to(torch.bfloat16)
    x = (torch.randn(4, 256) * 100 + 1000).to(torch.bfloat16)
    got = norm(x)
    assert got.dtype == torch.bfloat16
    want = config.build(BuildContext(d_model=256))(x.float())
    torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2)
