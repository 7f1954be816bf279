"""The reference of attention, its mask rule, and the choice of a form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hybridtf.core.errors import ConfigError
from hybridtf.core.kernels import KernelSet
from hybridtf.ops.attention import KERNELS, AttentionMask, attention_reference, attention_torch
from hybridtf.ops.attention.banded import attention_banded
from hybridtf.ops.attention.blockwise import attention_blockwise
from hybridtf.ops.attention.choose import chosen_form
from hybridtf.ops.attention.flash import attention_flash
from hybridtf.ops.attention.sdpa import attention_sdpa
from hybridtf.ops.attention.tiled import attention_tiled
from tests.ops.attention_cases import Case, check_equal, naive_attention, random_case, run, tensors

ALL = {
    "reference": attention_reference, "torch": attention_torch, "sdpa": attention_sdpa,
    "blockwise": attention_blockwise, "flash": attention_flash, "tiled": attention_tiled,
}
every = pytest.mark.parametrize("fn", ALL.values(), ids=ALL)


@pytest.mark.parametrize("seed", range(40))
def test_reference_is_the_rule_written_as_a_loop(seed: int) -> None:
    case = random_case(seed)
    check_equal(run(attention_reference, case), run(naive_attention, case), case, atol=1e-10)


@pytest.mark.parametrize("seed", range(120))
def test_torch_kernel_equals_reference(seed: int) -> None:
    case = random_case(1000 + seed)
    check_equal(run(attention_torch, case), run(attention_reference, case), case, atol=1e-10)


@every
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("h", "g"), [(4, 4), (6, 1), (6, 2), (6, 3)])
def test_plain_cases_equal_torch_math(fn, causal: bool, h: int, g: int) -> None:
    case = replace(tensors(2, 17, 17, h, g, 8, 8), mask=AttentionMask(causal))
    # Heads repeated in groups, not tiled.
    keys, values = (x.repeat_interleave(h // g, 2).transpose(1, 2) for x in (case.k, case.v))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = torch.nn.functional.scaled_dot_product_attention(case.q.transpose(1, 2), keys, values, is_causal=causal)
    upper = torch.randn_like(want)
    grads = torch.autograd.grad(want, [case.q, case.k, case.v], upper)
    got = run(fn, case, upper.transpose(1, 2))
    check_equal(got, [want.transpose(1, 2).detach(), *grads], case, atol=1e-12)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(fn, dtype: torch.dtype) -> None:
    case = tensors(2, 33, 33, 4, 2, 16, 16, dtype=dtype)
    exact = Case(*(x.detach().double().requires_grad_() for x in (case.q, case.k, case.v)), case.mask)
    got, want = run(fn, case), run(attention_reference, exact)
    assert all(x.dtype == dtype for x in got)
    atol = 2e-6 if dtype == torch.float32 else 4e-2
    check_equal([x.double() for x in got], want, case, atol=atol, rtol=atol)


@every
def test_autocast_changes_nothing(fn) -> None:
    case = tensors(1, 9, 9, 2, 1, 4, 4, dtype=torch.float32)
    want = fn(case.q, case.k, case.v, case.mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = fn(case.q, case.k, case.v, case.mask)
    assert torch.equal(got, want)


@every
@pytest.mark.parametrize("n_new", [1, 2, 3])
def test_last_queries_over_a_cache_are_the_last_rows(fn, n_new: int) -> None:
    case = tensors(1, 4, 4, 2, 2, 8, 8)
    full = attention_reference(case.q, case.k, case.v, case.mask)
    last = fn(case.q[:, -n_new:], case.k, case.v, case.mask)
    torch.testing.assert_close(last, full[:, -n_new:], atol=1e-12, rtol=0)


@every
@pytest.mark.parametrize("mask_kind", ["none", "ones", "pads"])
def test_no_form_of_the_mask_lets_the_future_in(fn, mask_kind: str) -> None:
    case = tensors(2, 8, 8, 2, 1, 4, 4)
    pads = torch.tensor([[1] * 8, [0, 1, 1, 0, 1, 1, 1, 0]])
    ids = {"none": None, "ones": torch.ones(2, 8).long(), "pads": pads}[mask_kind]
    mask = AttentionMask(q_ids=ids, k_ids=ids)
    before = fn(case.q, case.k, case.v, mask)[:, :5]
    q, k, v = (torch.cat([x[:, :5], x[:, 5:] * -3 + 1], 1) for x in (case.q, case.k, case.v))
    torch.testing.assert_close(fn(q, k, v, mask)[:, :5], before, atol=1e-14, rtol=0)


@every
@pytest.mark.parametrize(("t", "s", "b"), [(0, 5, 2), (5, 0, 2), (0, 0, 1), (3, 4, 0), (3, 2, 1)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ids", [True, False])
def test_empty_calls(fn, t: int, s: int, b: int, causal: bool, ids: bool) -> None:
    case = tensors(b, t, s, 4, 2, 3, 3)
    marks = {"q_ids": torch.ones(b, t).long(), "k_ids": torch.ones(b, s).long()} if ids else {}
    case = replace(case, mask=AttentionMask(causal, **marks))
    got = run(fn, case)
    assert got[0].shape == (b, t, 4, 3)
    check_equal(got, run(attention_reference, case), case, atol=1e-12)
    assert s or not got[0].any()


@every
@pytest.mark.parametrize("garbage", [1e30, -1e30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_invisible_content_changes_nothing(fn, garbage: float, dtype: torch.dtype) -> None:
    ids = torch.tensor([[1, 1, 0, 1, 2, 2, 0], [0, 0, 0, 0, 0, 0, 0]])
    case = replace(tensors(2, 7, 7, 4, 2, 4, 4, dtype=dtype), mask=AttentionMask(q_ids=ids, k_ids=ids))
    clean = run(fn, case)
    with torch.no_grad():
        for x in (case.q, case.k, case.v):
            x[ids == 0] = garbage
    dirty = run(fn, case)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert torch.isfinite(dirty[0]).all()


@every
def test_a_row_that_sees_nothing_is_zero_both_ways(fn) -> None:
    q_ids, k_ids = torch.tensor([[1, 0, 3, 1]]), torch.tensor([[1, 1, 2, 1]])
    case = replace(tensors(1, 4, 4, 2, 1, 8, 8), mask=AttentionMask(q_ids=q_ids, k_ids=k_ids))
    # Anomaly mode also finds a NaN that a later step of the backward pass would hide.
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        out, dq, dk, dv = run(fn, case)
    assert not out[0, 1:3].any()
    assert not dq[0, 1:3].any()
    assert not dk[0, 2].any()
    assert not dv[0, 2].any()
    assert out[0, 0].any()
    assert dq[0, 3].any()


@pytest.mark.parametrize("fn", [attention_reference, attention_torch], ids=["reference", "torch"])
def test_a_sink_alone_is_zero_both_ways(fn) -> None:
    ids = torch.tensor([[0, 1]])
    sinks = torch.ones(2, dtype=torch.float64, requires_grad=True)
    case = replace(tensors(1, 2, 2, 2, 1, 4, 4), mask=AttentionMask(q_ids=ids, k_ids=ids, sinks=sinks))
    upper = torch.zeros(1, 2, 2, 4, dtype=torch.float64)
    upper[:, 0] = 1
    assert not any(x.any() for x in run(fn, case, upper)[1:])
    assert not run(fn, case)[0][:, 0].any()
    assert run(fn, case)[4].any()


@pytest.mark.parametrize(
    "fn", [attention_reference, attention_torch, attention_sdpa, attention_blockwise, attention_banded]
)
def test_window_counts_the_token_itself_in_prefill_and_decode(fn) -> None:
    t, window = 10, 4
    q = k = torch.zeros(1, t, 1, t, dtype=torch.float64)
    v = torch.eye(t, dtype=torch.float64)[None, :, None]
    mask = AttentionMask(window=window)
    whole = fn(q, k, v, mask)[0, :, 0] > 0
    steps = [fn(q[:, i : i + 1], k[:, : i + 1], v[:, : i + 1], mask)[0, 0, 0] > 0 for i in range(t)]
    for i in range(t):
        wanted = list(range(max(i - window + 1, 0), i + 1))
        assert whole[i].nonzero()[:, 0].tolist() == wanted
        assert steps[i].nonzero()[:, 0].tolist() == wanted


@pytest.mark.parametrize("window", [4, 8, 100])
@pytest.mark.parametrize("t", [1, 2, 7, 8, 9, 31])
def test_a_window_over_all_tokens_is_full_attention(window: int, t: int) -> None:
    case = tensors(1, t, t, 2, 1, 4, 4)
    got = attention_torch(case.q, case.k, case.v, AttentionMask(window=window))
    full = attention_reference(case.q, case.k, case.v, AttentionMask())
    assert torch.allclose(got, full, atol=1e-12, rtol=0) == (window >= t)


def test_no_form_makes_minus_infinity_twice() -> None:
    ids = torch.tensor([[0, 0, 0, 1, 1]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        case = replace(tensors(1, 5, 5, 2, 1, 4, 4, dtype=dtype), mask=AttentionMask(q_ids=ids, k_ids=ids))
        ones = torch.ones_like(case.v)
        for fn in ALL.values():
            sums = fn(case.q, case.k, ones, case.mask)
            torch.testing.assert_close(sums[:, 3:], ones.new_ones(1, 2, 2, 4), atol=1e-3, rtol=0)
            assert not sums[:, :3].any()


@pytest.mark.parametrize(
    ("mask", "t", "s", "form"),
    [
        (AttentionMask(), 4096, 4096, "sdpa"),
        (AttentionMask(causal=False), 4096, 5000, "sdpa"),
        (AttentionMask(), 4096, 5000, "blockwise"),
        (AttentionMask(), 1, 5000, "sdpa"),
        (AttentionMask(), 64, 200, "sdpa"),
        (AttentionMask(window=100), 4096, 4096, "banded"),
        (AttentionMask(window=100), 1, 4096, "banded"),
        (AttentionMask(window=5000), 4096, 4096, "sdpa"),
        (AttentionMask(causal=False, window=100), 4096, 4096, "blockwise"),
        (AttentionMask(softcap=30.0), 16, 16, "blockwise"),
        (AttentionMask(sinks=torch.zeros(2)), 16, 16, "blockwise"),
        (AttentionMask(slopes=torch.zeros(2)), 1, 16, "few"),
        (AttentionMask(sinks=torch.zeros(2)), 9, 5000, "blockwise"),
        (AttentionMask(q_ids=torch.ones(1, 1).long(), k_ids=torch.ones(1, 9000).long()), 1, 9000, "sdpa"),
        (AttentionMask(q_ids=torch.ones(1, 4096).long(), k_ids=torch.ones(1, 4096).long()), 4096, 4096, "blockwise"),
    ],
)
def test_chosen_form(mask: AttentionMask, t: int, s: int, form: str) -> None:
    q, k = torch.empty(1, t, 2, 8), torch.empty(1, s, 1, 8)
    assert chosen_form(q, k, k, mask) == form


def test_chosen_form_with_dropout_never_writes_out_long_scores() -> None:
    q, k = torch.empty(1, 4096, 2, 8), torch.empty(1, 4096, 1, 8)
    for mask in (AttentionMask(), AttentionMask(causal=False), AttentionMask(window=100)):
        assert chosen_form(q, k, k, mask, 0.1) == "blockwise"


def test_faults_are_named() -> None:
    q, k, v = (x.detach() for x in (lambda c: (c.q, c.k, c.v))(tensors(2, 3, 5, 4, 2, 8, 6)))
    ids = torch.ones(2, 3).long()
    with pytest.raises(ConfigError, match="window"):
        AttentionMask(window=0)
    with pytest.raises(ConfigError, match="softcap"):
        AttentionMask(softcap=0.0)
    with pytest.raises(ConfigError, match="q_ids and k_ids"):
        AttentionMask(q_ids=ids)
    with pytest.raises(ConfigError, match="q_pos and k_pos"):
        AttentionMask(k_pos=ids)
    for fn in (attention_reference, attention_torch, attention_blockwise):
        with pytest.raises(ConfigError, match="4 query heads are not a multiple of 3"):
            fn(q, k[:, :, :1].expand(-1, -1, 3, -1), v[:, :, :1].expand(-1, -1, 3, -1), AttentionMask())
        with pytest.raises(ConfigError, match=r"k_ids must have shape \(2, 5\); got \(2, 3\)"):
            fn(q, k, v, AttentionMask(q_ids=ids, k_ids=ids))
        with pytest.raises(ConfigError, match="do not fit"):
            fn(q, k[..., :7], v, AttentionMask())
        with pytest.raises(ConfigError, match="dropout_p"):
            fn(q, k, v, AttentionMask(), dropout_p=1.0)


def test_kernels_bind_by_priority() -> None:
    kernels = KernelSet(KERNELS)
    assert [k.name for k in kernels.of("attention")] == ["torch", "reference", "flash", "tiled"]
    bound = kernels.bind("attention", device=torch.device("cpu"), dtype=torch.float32)
    assert set(bound.chosen.values()) == {"torch"}
    case = tensors(1, 4, 4, 2, 1, 8, 8, dtype=torch.float32)
    torch.testing.assert_close(
        bound(case.q, case.k, case.v, case.mask, n_tokens=4), attention_reference(case.q, case.k, case.v, case.mask)
    )
