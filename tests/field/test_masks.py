"""Masks of attention: rows that see nothing, what lies behind a mask, the future, dropout."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import Segments, active
from hybridtf.ops.attention import AttentionMask
from tests.field.layers import EVERY, F32, F64, config, every, mixer, same

FORMS = active().kernels.of("attention")
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda kernel: kernel.name)
WITH_DROPOUT = [name for name in EVERY if "dropout" in type(config(name)).model_fields]


@every_form
def test_a_query_that_sees_nothing_gives_zero_and_no_nan_in_the_gradient(form):
    attend = form.load()
    q, k, v = (torch.randn(1, 4, 2, 8, dtype=F64, requires_grad=True) for _ in range(3))
    ids = torch.tensor([[1, 0, 1, 1]])
    y = attend(q, k, v, AttentionMask(causal=False, q_ids=ids, k_ids=torch.ones(1, 4, dtype=torch.int64)))
    assert not y[0, 1].any()
    weights = torch.softmax(torch.einsum("bthk,bshk->bhts", q, k) / 8**0.5, -1)
    same(y[:, [0, 2, 3]], torch.einsum("bhts,bshv->bthv", weights, v)[:, [0, 2, 3]])
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(y.sum(), [q, k, v]))


@every_form
@torch.no_grad()
def test_huge_content_behind_the_mask_changes_nothing(form):
    attend = form.load()
    q, k, v = (torch.randn(1, 4, 2, 8, dtype=F64) for _ in range(3))
    mask = AttentionMask(causal=False, q_ids=torch.ones(1, 4, dtype=torch.int64), k_ids=torch.tensor([[1, 1, 1, 2]]))
    k[:, 3], v[:, 3] = 0.0, 0.0
    want = attend(q, k, v, mask)
    k[:, 3], v[:, 3] = 1e30, 1e30
    assert torch.equal(attend(q, k, v, mask), want)


@every
@torch.no_grad()
def test_nan_at_pads_changes_nothing(name):
    layer = mixer(name, "segment")
    x, mask = torch.randn(1, 4, 16, dtype=F64), torch.tensor([[True, True, True, False]])
    clean = layer(x, segments=Segments.from_mask(mask), state=layer.init_state(1))
    x[~mask] = float("nan")
    dirty = layer(x, segments=Segments.from_mask(mask), state=layer.init_state(1))
    assert torch.equal(clean[0][mask], dirty[0][mask])
    later = torch.randn(1, 1, 16, dtype=F64)
    assert torch.equal(layer(later, state=clean[1])[0], layer(later, state=dirty[1])[0])


WIDER = {"gdn2": (1e-1, "what two tokens read out of the memory nearly cancels, and is then normalised")}
"""Mixers whose bfloat16 is further than 5 % from float64 on a document of two tokens, and why."""


@every
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_positions_masked_twice_do_not_overflow(name, dtype):
    """Three left pads under the causal rule, in each precision."""
    layer, wide = mixer(name, "segment", dtype=F32).to(dtype), mixer(name, dtype=F64)
    wide.load_state_dict({key: value.double() for key, value in layer.state_dict().items()})
    x = torch.randn(1, 5, 16).to(dtype)
    mask = torch.tensor([[0, 0, 0, 1, 1]]).bool()
    y, state = layer(x, segments=Segments.from_mask(mask), state=layer.init_state(1))
    assert y.isfinite().all()
    assert layer(x[:, 4:], state=state)[0].isfinite().all()
    want = wide(x[:, 3:].double())[0]
    tol = 1e-5 if dtype == F32 else WIDER.get(name, (5e-2, ""))[0] if dtype == torch.bfloat16 else 5e-2
    torch.testing.assert_close(y[:, 3:].double(), want, rtol=0, atol=tol * float(want.abs().max()))


@every_form
@pytest.mark.parametrize("n_new", [1, 2, 3])
@torch.no_grad()
def test_new_queries_over_a_cache_line_up_with_its_end(form, n_new):
    attend = form.load()
    q, k, v = (torch.randn(1, 4, 2, 8, dtype=F64) for _ in range(3))
    full = attend(q, k, v, AttentionMask())
    same(attend(q[:, -n_new:], k, v, AttentionMask()), full[:, -n_new:])


@every
@pytest.mark.parametrize("mask", [None, "11111111", "01101111"])
@torch.no_grad()
def test_the_future_is_hidden_with_and_without_a_mask(name, mask):
    layer = mixer(name, "causal")
    segments = None if mask is None else Segments.from_mask(torch.tensor([[int(c) for c in mask]]))
    x = torch.randn(1, 8, 16, dtype=F64)
    changed = torch.cat([x[:, :5], torch.randn(1, 3, 16, dtype=F64)], 1)
    first, second = (layer(z, segments=segments)[0] for z in (x, changed))
    same(first[:, :5], second[:, :5], 1e-12)
    assert not torch.equal(first[:, 5:], second[:, 5:])


@pytest.mark.parametrize("name", WITH_DROPOUT)
@torch.no_grad()
def test_dropout_is_off_in_eval_mode(name):
    layer, plain = mixer(name, dropout=0.5), mixer(name, dropout=0.0)
    x = torch.randn(1, 8, 16, dtype=F64)
    assert torch.equal(layer(x)[0], layer(x)[0])
    assert torch.equal(layer(x)[0], plain(x)[0])
    layer.train()
    assert not torch.equal(layer(x)[0], layer(x)[0])


@pytest.mark.parametrize("name", WITH_DROPOUT)
@torch.no_grad()
def test_dropout_comes_back_after_an_evaluation(name):
    layer, x = mixer(name, dropout=0.5).train(), torch.randn(1, 8, 16, dtype=F64)
    layer(x)
    layer.eval()(x)
    layer.train()
    assert not torch.equal(layer(x)[0], layer(x)[0])
