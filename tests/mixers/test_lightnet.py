"""LightNet against a softmax over time in one line, fla's plain loop of GLA, and at extreme numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtf.core import BuildContext, ConfigError, Segments
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import LightNetConfig
from hybridtf.nn.running_softmax import running_softmax
from tests.ops.ssd_cases import random_segments
from tests.peers import peer

D = 12


def build(config: LightNetConfig):
    return config.build(BuildContext(d_model=D, param_dtype=torch.float64))


def projected(m, x: Tensor):
    given = [m.q_proj(x), m.k_proj(x), m.v_proj(x)]
    if m.conv is not None:
        for i, conv in enumerate((m.conv.q, m.conv.k, m.conv.v)):
            w = conv.weight
            given[i] = F.conv1d(F.pad(given[i].mT, (w.shape[1] - 1, 0)), w[:, None], conv.bias, groups=len(w)).mT
    q, k, v = (z.unflatten(-1, (m.config.n_heads, -1)) for z in given)
    return F.silu(q), k, v


def finished(m, y: Tensor, x: Tensor) -> Tensor:
    y = F.rms_norm(y.flatten(-2), (D,), m.norm.weight, m.config.eps)
    return m.out_proj(y * F.silu(x @ m.gate_down_proj.weight.T @ m.gate_up_proj.weight.T))


def by_softmax(m, x: Tensor) -> Tensor:
    q, k, v = projected(m, x)
    rows = [torch.einsum("bshk,bshv->bhkv", k[:, : t + 1].softmax(1), v[:, : t + 1]) for t in range(x.shape[1])]
    return finished(m, torch.einsum("bthk,tbhkv->bthv", q, torch.stack(rows)) * m.key_dim**-0.5, x)


def by_fla(m, x: Tensor) -> Tensor:
    q, k, v = projected(m, x)
    z = k.logcumsumexp(1)
    decay = torch.cat([z[:, :1], z[:, :-1]], 1) - z
    with StrictFloat64():
        y, _ = peer("fla/ops/gla/naive.py").naive_recurrent_gla(q, (k - z).exp(), v, decay)
    return finished(m, y, x)


@pytest.mark.parametrize("theirs", [by_softmax, by_fla])
@pytest.mark.parametrize(
    "config",
    [
        LightNetConfig(n_heads=3, gate_rank=5, chunk_size=4),
        LightNetConfig(n_heads=2, head_dim=3, gate_rank=2, d_conv=3, conv_bias=True, chunk_size=8),
    ], ids=["published", "convolutions"],
)
def test_against_other_ways_to_say_it(config, theirs) -> None:
    mixer = build(config)
    x = torch.randn(2, 11, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    found, expected = mixer(x)[0], theirs(mixer, x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    given = [x, *mixer.parameters()]
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), given) for y in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [1.0, 30.0, 800.0])
def test_documents_do_not_see_each_other(size: float) -> None:
    """Each document alone, whatever the size of what lies before it in the row."""
    segments = random_segments(3, 6, 40)
    x = size * torch.randn(6, 40, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    before = size * torch.randn(6, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = running_softmax(x, before, torch.tensor([0, 0, 2, 2, 5, 5]), segments)
    for row in range(6):
        for document in segments.ids[row].unique().tolist():
            at = segments.ids[row] == document
            if document == 0:
                continue
            carries = bool(segments.continues[row]) and document == int(segments.first_id[row]) and row >= 2
            alone = torch.cat([before[row][None], x[row, at]]) if carries else x[row, at]
            z = alone.logcumsumexp(0)
            kept = z[:-1] - z[1:]
            torch.testing.assert_close(found.weight[row, at], (alone - z).exp()[carries:], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(found.log_kept[row, at][not carries :], kept, rtol=1e-9, atol=1e-9)
            if document == int(segments.last_id[row]):
                torch.testing.assert_close(found.total[row], z[-1], rtol=1e-12, atol=1e-9)


def test_a_first_token_is_its_own_average_however_small() -> None:
    x = torch.full((1, 2, 1), -800.0, requires_grad=True)
    found = running_softmax(x, torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), None)
    torch.testing.assert_close(found.weight[0, :, 0], torch.tensor([1.0, 0.5]))
    (grad,) = torch.autograd.grad(found.weight[0, 1, 0] + found.total.sum(), x)
    assert bool(grad.isfinite().all())
    empty = running_softmax(x, None, None, Segments.from_mask(torch.zeros(1, 2)))
    assert empty.total.item() == 0


def test_long_inputs_in_float32() -> None:
    mixer = build(LightNetConfig(n_heads=2, gate_rank=2))
    x = 20 * torch.randn(1, 3000, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        expected, found = mixer(x)[0], mixer.float()(x.float())[0]
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="12 does not divide into n_heads = 5"):
        build(LightNetConfig(n_heads=5))
