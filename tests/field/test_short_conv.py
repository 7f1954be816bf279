"""The window of a short convolution, and pieces shorter than its width."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hybridtf.core import BuildContext, active
from hybridtf.nn import ShortConv
from tests.field.layers import F64, same

FORMS = active().kernels.of("short_conv")
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda kernel: kernel.name)


@every_form
def test_gradients_through_the_carried_window_are_not_shifted_by_short_pieces(form):
    op = form.load()
    x, window = (torch.randn(1, n, 3, dtype=F64, requires_grad=True) for n in (7, 3))
    weight = torch.randn(3, 4, dtype=F64, requires_grad=True)
    out_weight, last_weight = torch.randn(1, 7, 3, dtype=F64), torch.randn(1, 3, 3, dtype=F64)
    last, out = window, []
    for part in x.split([1, 2, 1, 3], 1):
        y, last = op(part, weight, initial_state=last)
        out.append(y)
    got = torch.autograd.grad((torch.cat(out, 1) * out_weight).sum() + (last * last_weight).sum(), [x, window, weight])
    tokens = torch.cat([window, x], 1)
    whole = F.conv1d(tokens.transpose(1, 2), weight[:, None], groups=3).transpose(1, 2)
    same(torch.cat(out, 1), whole)
    same(last, tokens[:, 7:])
    want = torch.autograd.grad((whole * out_weight).sum() + (tokens[:, 7:] * last_weight).sum(), [x, window, weight])
    for a, b in zip(got, want, strict=True):
        same(a, b)


@every_form
def test_outputs_are_not_the_tail_of_a_padded_convolution(form):
    op = form.load()
    x = torch.arange(20.0)[None, :, None].expand(1, 20, 2).contiguous()
    delta = torch.tensor([[0.0, 0.0, 0.0, 1.0]] * 2)
    y, _ = op(x, delta)
    assert torch.equal(y, x)
    weight = torch.randn(2, 4)
    for t in range(19):
        later = x.clone()
        later[:, t + 1] += 100.0
        assert torch.equal(op(later, weight)[0][:, : t + 1], op(x, weight)[0][:, : t + 1])


@every_form
@pytest.mark.parametrize("k", range(1, 8))
@torch.no_grad()
def test_the_current_token_counts_once_between_prefill_and_steps(form, k):
    """The window holds the last width - 1 tokens, all of them past."""
    conv = ShortConv(BuildContext(d_model=4, param_dtype=F64), 4, bias=True, activation=None, kernel=form.name)
    for p in conv.parameters():
        p.copy_(torch.randn(p.shape))
    x = torch.randn(1, 8, 4, dtype=F64)
    padded = F.pad(x.transpose(1, 2), (3, 0))
    want = F.conv1d(padded, conv.weight[:, None], conv.bias, groups=4).transpose(1, 2)
    y, state = conv(x[:, :k], None, conv.init_state(1))
    same(y, want[:, :k])
    for t in range(k, 8):
        assert torch.equal(state["window"], padded.transpose(1, 2)[:, t : t + 3])
        y, state = conv(x[:, t : t + 1], None, state)
        same(y, want[:, t : t + 1])
