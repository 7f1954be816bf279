from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import BuildContext, ConfigError
from hybridtf.interop.strict import StrictFloat64
from hybridtf.mixers import HGRNConfig
from hybridtf.models import LanguageModelConfig
from tests.peers import peer

D, F64 = 6, torch.float64


def build(layer: int = 0, n_layers: int = 1, edges=(), **options):
    ctx = BuildContext(d_model=D, layer_idx=layer, n_layers=n_layers, edges=frozenset(edges), param_dtype=F64)
    mixer = HGRNConfig(expand=1.5, **options).build(ctx)
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(torch.randn(p.shape, dtype=F64) * 0.5)
    return mixer


def as_published(mixer, x, bound=None):
    """flash-linear-attention's layer, its recurrence run as it is."""
    i, f = mixer.i_proj(x), mixer.f_proj(x)
    if mixer.conv is not None:
        i, f = (causal(z, conv.weight) for z, conv in ((i, mixer.conv.i), (f, mixer.conv.f)))
    f = F.logsigmoid(f)
    if bound is not None:
        f = torch.logaddexp(bound.log(), torch.log1p(-bound) + f)
    i = F.silu(i) * (1 - f.exp())
    with StrictFloat64():
        h, _ = peer("fla/ops/hgrn/naive.py").naive_recurrent_hgrn(i, f)
    gate = mixer.gate_proj(x)
    return mixer.out_proj(F.rms_norm(h, h.shape[-1:], mixer.norm.weight, mixer.norm.eps) * F.silu(gate))


def causal(x, taps):
    return F.conv1d(F.pad(x.mT, (taps.shape[1] - 1, 0)), taps[:, None], groups=taps.shape[0]).mT


def assert_same(got, want, inputs):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    weight = torch.randn_like(want)
    ours, theirs = (torch.autograd.grad((y * weight).sum(), inputs, retain_graph=True) for y in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"d_conv": 3}, {"lower_bound": False}])
def test_one_layer_equals_the_published_one(options):
    mixer = build(**options)
    assert not mixer.extra_results()
    x = torch.randn(2, 13, D, dtype=F64, requires_grad=True)
    assert_same(mixer(x)[0], as_published(mixer, x), [x, *mixer.parameters()])


def test_bounds_rise_through_a_stack_as_published():
    """Three layers of a stack of three: the first owns the table, and the others get what the published model computes."""
    first = build(0, 3)
    second = build(1, 3, first.writes)
    third = build(2, 3, (*first.writes, *second.writes))
    assert [len(list(layer.bounds.parameters())) for layer in (first, second, third)] == [1, 0, 0]
    x = torch.randn(2, 9, D, dtype=F64, requires_grad=True)
    y, _, extras = first(x)
    got, edges = [y], dict(extras.edges)
    for layer in (second, third):
        got.append(layer(x, edges={name: edges[name] for name in layer.reads})[0])
    bounds = first.bounds.table.softmax(0)
    bounds = bounds.cumsum(0) - bounds[0]
    want = [as_published(first, x), as_published(second, x, bounds[1]), as_published(third, x, bounds[2])]
    inputs = [x, first.bounds.table, *(layer.f_proj.weight for layer in (first, second, third))]
    assert_same(torch.stack(got), torch.stack(want), inputs)


def test_no_channels_are_refused():
    with pytest.raises(ConfigError, match=r"expand \* d_model = 0.06"):
        HGRNConfig(expand=0.01).build(BuildContext(d_model=D))


def test_a_table_that_no_layer_reads_is_let_go():
    """The only such layer of a stack, inside a combinator too, has no table that nothing would ever train."""
    adapted = {"type": "lora", "mixer": {"type": "hgrn"}, "rank": 2, "on": ["f_proj"]}
    blocks = {"a": {"mixer": {"type": "attention", "n_heads": 2}}, "h": {"mixer": {"type": "hgrn"}}, "l": {"mixer": adapted}}
    for pattern, has_table in (("h a*2", False), ("l a*2", False), ("h a h", True), ("l a l", True), ("l a h", True)):
        used = {name: block for name, block in blocks.items() if name in pattern}
        model = LanguageModelConfig(vocab_size=7, d_model=8, n_layers=3, pattern=pattern, blocks=used).build()
        assert any("table" in name for name, _ in model.named_parameters()) == has_table, pattern
        assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
