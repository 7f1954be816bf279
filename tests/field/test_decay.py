"""Strong and weak decay side by side, its gradients, and norms of nothing."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import active
from tests.field.layers import F32, F64, mixer

FORMS = active().kernels.of("ssd")


@pytest.mark.parametrize("form", FORMS, ids=lambda kernel: kernel.name)
def test_a_head_that_forgets_at_once_beside_one_that_keeps_all(form):
    """Gates of -20 a token beside -0.001: no exponent may become large and positive on the way."""
    op, judge = form.load(), next(kernel for kernel in FORMS if kernel.name == "reference").load()
    x = [torch.randn(2, 64, n, w) for n, w in ((1, 4), (1, 4), (2, 6))]
    x.append(torch.tensor([-20.0, -1e-3]).expand(2, 64, 2).contiguous())
    weight = torch.randn(2, 64, 2, 6)
    results = []
    for function, dtype in ((op, F32), (judge, F64)):
        given = [z.to(dtype).requires_grad_() for z in x]
        y, state = function(*given)
        loss = (y * weight.to(dtype)).sum() + state.square().sum()
        results.append([y, state, *torch.autograd.grad(loss, given)])
    for got, want in zip(*results, strict=True):
        assert got.isfinite().all()
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gate", [-2.0, -4.0, -6.0, -8.0])
def test_decay_parameters_train_on_signal_where_decay_is_strong(gate):
    """Gradients of A_log and dt_bias through the layer, float32 against float64, over 70 tokens."""
    options = {"n_heads": 4, "head_dim": 4, "n_groups": 2, "d_state": 4, "chunk_size": 64}
    found = {}
    for dtype in (F32, F64):
        layer = mixer("mamba2", dtype=dtype, **options)
        with torch.no_grad():
            layer.in_proj.weight[-4:] *= 0.1  # steps near softplus(0.5413) = 1
            layer.dt_bias.fill_(0.5413)
            layer.A_log.fill_(torch.tensor(-gate, dtype=F64).log())
        generator = torch.Generator().manual_seed(3)
        x, weight = (torch.randn(2, 70, 16, generator=generator, dtype=F32).to(dtype) for _ in range(2))
        loss = (layer(x)[0] * weight).sum()
        found[dtype] = torch.autograd.grad(loss, [layer.A_log, layer.dt_bias, layer.in_proj.weight])
    for got, want in zip(found[F32], found[F64], strict=True):
        error = (got.double() - want).square().mean().sqrt() / want.square().mean().sqrt()
        assert float(error) < (1e-4 if gate >= -4 else 1e-3)
        assert want.abs().max() > 1e-6


@pytest.mark.parametrize("norm", [{"type": "rms_norm"}, {"type": "layer_norm"}], ids=lambda norm: norm["type"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_queries_and_keys_of_zero_have_finite_gradients_through_their_norm(norm, dtype):
    layer = mixer("attention", dtype=dtype, qk_norm=norm)
    x = torch.randn(1, 5, 16, dtype=dtype)
    x[:, 2:4] = 0.0
    x.requires_grad_()
    y = layer(x)[0]
    y.square().sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
