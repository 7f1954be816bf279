"""Groups of heads that share keys and values: repeated in groups, never tiled."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core import active
from hybridtf.ops.attention import AttentionMask
from tests.field.layers import F64, mixer, same, solo, steps

FORMS = active().kernels.of("attention")
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda kernel: kernel.name)


@every_form
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@torch.no_grad()
def test_key_heads_are_repeated_in_groups_in_attention(form, kv_heads):
    attend = form.load()
    q = torch.randn(2, 5, 6, 4, dtype=F64)
    k, v = (torch.randn(2, 5, kv_heads, 4, dtype=F64) for _ in range(2))
    repeated = [x.repeat_interleave(6 // kv_heads, 2) for x in (k, v)]
    same(attend(q, k, v, AttentionMask()), attend(q, *repeated, AttentionMask()))
    if kv_heads in (2, 3):
        tiled = [x.repeat(1, 1, 6 // kv_heads, 1) for x in (k, v)]
        assert (attend(q, k, v, AttentionMask()) - attend(q, *tiled, AttentionMask())).abs().max() > 1e-3


@pytest.mark.parametrize("kernel", active().kernels.of("ssd"), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("t", [1, 5])
@torch.no_grad()
def test_key_groups_are_repeated_in_groups_in_a_recurrence(kernel, groups, t):
    op = kernel.load()
    q, k = (torch.randn(2, t, groups, 4, dtype=F64) for _ in range(2))
    v, log_a = torch.randn(2, t, 6, 3, dtype=F64), -torch.rand(2, t, 6, dtype=F64)
    repeated = [x.repeat_interleave(6 // groups, 2) for x in (q, k)]
    for a, b in zip(op(q, k, v, log_a), op(*repeated, v, log_a), strict=True):
        same(a, b)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@torch.no_grad()
def test_a_layer_of_few_key_heads_is_one_of_many_equal_ones(kv_heads):
    few = mixer("attention", n_heads=6, n_kv_heads=kv_heads, head_dim=4)
    many = mixer("attention", n_heads=6, n_kv_heads=6, head_dim=4)
    weights = few.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        weights[name] = weights[name].unflatten(0, (kv_heads, 4)).repeat_interleave(6 // kv_heads, 0).flatten(0, 1)
    many.load_state_dict(weights)
    x = torch.randn(2, 5, 16, dtype=F64)
    same(few(x)[0], many(x)[0])
    same(steps(few, x[:, 3:], solo(few, x[:, :3])[1])[0], many(x)[0][:, 3:])


@every_form
@torch.no_grad()
def test_one_token_over_a_padded_cache_with_eight_heads_on_two(form):
    """The mask of a step is one row of keys a batch row, whatever the heads."""
    attend = form.load()
    q = torch.randn(2, 1, 8, 4, dtype=F64)
    k, v = (torch.randn(2, 16, 2, 4, dtype=F64) for _ in range(2))
    valid = torch.arange(16) < torch.tensor([[16], [11]])
    places = {"q_pos": torch.tensor([[15], [10]]), "k_pos": torch.arange(16).expand(2, -1)}
    y = attend(q, k, v, AttentionMask(q_ids=torch.ones(2, 1).long(), k_ids=valid.long(), **places))
    for row, n in ((0, 16), (1, 11)):
        keys, values = (x[row : row + 1, :n].repeat_interleave(4, 2) for x in (k, v))
        weights = torch.softmax(torch.einsum("bthk,bshk->bhts", q[row : row + 1], keys) / 2, -1)
        same(y[row : row + 1], torch.einsum("bhts,bshv->bthv", weights, values))
