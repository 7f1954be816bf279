"""The forms of attention that go through torch's scaled_dot_product_attention: sdpa, banded and flash."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hybridtf.core.errors import KernelError
from hybridtf.core.kernels import Kernel, KernelRequest
from hybridtf.ops.attention import KERNELS, AttentionMask, attention_reference, attention_torch
from hybridtf.ops.attention.banded import attention_banded
from hybridtf.ops.attention.choose import chosen_form
from hybridtf.ops.attention.few import attention_few
from hybridtf.ops.attention.flash import attention_flash
from hybridtf.ops.attention.sdpa import attention_sdpa, is_linear
from tests.ops.attention_cases import Case, check_equal, packed_ids, random_case, run, tensors

FLASH: Kernel = next(kernel for kernel in KERNELS if kernel.name == "flash")


# -- sdpa ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(120))
def test_sdpa_equals_reference(seed: int) -> None:
    case = random_case(20000 + seed, plain=True)
    check_equal(run(attention_sdpa, case), run(attention_reference, case), case, atol=1e-10)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("mask_form", ["bool", "additive"])
def test_rows_that_see_nothing_are_zero_in_every_backend(backend: SDPBackend, mask_form: str) -> None:
    shown = torch.ones(4, 4, dtype=torch.bool)
    shown[1] = False
    ids = torch.tensor([[1, 0, 1, 1]])
    mask = AttentionMask(causal=False, q_ids=ids, k_ids=torch.ones(1, 4).long())
    case = replace(tensors(1, 4, 4, 2, 2, 8, 8), mask=mask)
    want = run(attention_reference, case)
    with sdpa_kernel(backend):
        check_equal(run(attention_sdpa, case), want, case, atol=1e-12)
        additive = torch.zeros(4, 4, dtype=torch.float64).masked_fill(~shown, -torch.inf)
        attn_mask = shown if mask_form == "bool" else additive
        outside = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (case.q, case.k, case.v)), attn_mask=attn_mask
        )
    torch.testing.assert_close(outside.transpose(1, 2), want[0], atol=1e-12, rtol=0, check_dtype=True)


def test_sdpa_refuses_what_it_cannot_say() -> None:
    case = tensors(1, 3, 3, 2, 1, 4, 4)
    for name, mask in {
        "softcap": AttentionMask(softcap=1.0), "slopes": AttentionMask(slopes=torch.ones(2)),
        "sinks": AttentionMask(sinks=torch.ones(2)),
        "decay": AttentionMask(q_decay=torch.ones(1, 3, 2), k_decay=torch.ones(1, 3, 2)),
        "relative": AttentionMask(rel_q=torch.ones(1, 3, 2, 1), rel_bank=torch.ones(1, 2)),
    }.items():
        with pytest.raises(KernelError, match=name):
            attention_sdpa(case.q, case.k, case.v, mask)


@pytest.mark.parametrize(("h", "g"), [(8, 2), (8, 8), (8, 1)])
def test_one_token_decode_over_a_buffer(h: int, g: int) -> None:
    case = tensors(3, 1, 16, h, g, 8, 8)
    length = torch.tensor([[1], [7], [16]])
    marks = {
        "q_ids": torch.ones(3, 1).long(), "k_ids": (torch.arange(16) < length).long(), "q_pos": length - 1,
        "k_pos": torch.arange(16).expand(3, -1),
    }
    case = replace(case, mask=AttentionMask(**marks))
    assert chosen_form(case.q, case.k, case.v, case.mask) == "sdpa"
    out = attention_torch(case.q, case.k, case.v, case.mask)
    for row, n in enumerate([1, 7, 16]):
        at = slice(row, row + 1)
        one = attention_reference(case.q[at], case.k[at, :n], case.v[at, :n], AttentionMask())
        torch.testing.assert_close(out[at], one, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("k", "v"), [(12, 8), (8, 12)])
def test_unequal_widths_keep_to_linear_memory_on_cpu(k: int, v: int) -> None:
    case = tensors(1, 40, 40, 4, 2, k, v)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        got = run(attention_sdpa, case)
    check_equal(got, run(attention_reference, case), case, atol=1e-12)


def test_where_torch_has_linear_memory() -> None:
    def meta(heads: int, width: int, dtype: torch.dtype, device: str = "meta") -> Tensor:
        return torch.empty(1, 4, heads, width, dtype=dtype, device=device)

    x = meta(4, 8, torch.float32, "cpu")
    assert is_linear(x, x, x, masked=True, dropout_p=0.0)
    assert not is_linear(x, x, x, masked=False, dropout_p=0.1)
    # Of a device that nothing is known about, nothing is promised.
    y = meta(4, 8, torch.float32)
    assert not is_linear(y, y, y, masked=False, dropout_p=0.0)


# -- few ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(120))
def test_few_equals_reference(seed: int) -> None:
    case = random_case(50000 + seed)
    check_equal(run(attention_few, case), run(attention_reference, case), case, atol=1e-10)


@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize("name", ["softcap", "slopes", "sinks", "own sinks", "relative"])
def test_few_queries_over_a_buffer_of_documents(name: str, t: int) -> None:
    case = tensors(3, t, 16, 4, 2, 8, 6)
    options = {
        "softcap": {"softcap": 2.0}, "slopes": {"slopes": torch.rand(4).double()}, "sinks": {"sinks": torch.randn(4).double()},
        "own sinks": {"sinks": torch.randn(3, t, 4).double()},
        "relative": {"rel_q": torch.randn(3, t, 4, 2).double(), "rel_bank": torch.randn(2, 5).double()},
    }[name]
    options = {field: x.requires_grad_() if isinstance(x, Tensor) else x for field, x in options.items()}
    length = torch.tensor([[t], [9], [16]])
    marks = {
        "q_ids": torch.tensor([[1], [1], [0]]).expand(-1, t), "k_ids": (torch.arange(16) < length).long(),
        "q_pos": length - t + torch.arange(t), "k_pos": torch.arange(16).expand(3, -1),
    }
    case = replace(case, mask=AttentionMask(**marks, **options))
    assert chosen_form(case.q, case.k, case.v, case.mask) == "few"
    check_equal(run(attention_torch, case), run(attention_reference, case), case, atol=1e-12)


# -- banded ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [None, "window", 8, 11])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("t", [1, 2, 7, 8, 9, 16, 17, 31])
def test_banded_equals_reference(t: int, window: int, block: int | str | None) -> None:
    size = window if block == "window" else block
    for extra in (0, 1, window - 1, window, 3 * window + 1):
        case = tensors(2, t, t + extra, 4, 2, 3, 3, seed=extra)
        case = replace(case, mask=AttentionMask(window=window))
        check_equal(run(attention_banded, case, block=size), run(attention_reference, case), case, atol=1e-10)


@pytest.mark.parametrize(("h", "g", "k", "v"), [(6, 1, 4, 4), (6, 3, 4, 7), (2, 2, 5, 3)])
def test_banded_with_grouped_heads_and_unequal_widths(h: int, g: int, k: int, v: int) -> None:
    case = replace(tensors(2, 200, 230, h, g, k, v), mask=AttentionMask(window=70))
    assert chosen_form(case.q, case.k, case.v, case.mask) == "banded"
    check_equal(run(attention_torch, case), run(attention_reference, case), case, atol=1e-10)


def test_banded_padding_is_invisible_to_real_tokens() -> None:
    case = replace(tensors(1, 150, 150, 2, 1, 4, 4), mask=AttentionMask(window=65))
    out = attention_banded(case.q, case.k, case.v, case.mask)
    for t in (1, 64, 65, 66, 129, 131):
        short = attention_banded(case.q[:, :t], case.k[:, :t], case.v[:, :t], case.mask)
        torch.testing.assert_close(short, out[:, :t], atol=1e-12, rtol=0)


def test_banded_saves_memory_linear_in_length() -> None:
    def saved(t: int) -> int:
        case = replace(tensors(1, t, t, 4, 2, 16, 16, dtype=torch.float32), mask=AttentionMask(window=64))
        kept: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.update({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()}) or x, lambda x: x
        ):
            attention_torch(case.q, case.k, case.v, case.mask)
        return sum(kept.values())

    assert saved(4096) <= 2.2 * saved(2048)
    assert saved(4096) < 4096 * 4096 * 4


def test_banded_refuses_other_masks() -> None:
    case = tensors(1, 5, 5, 2, 1, 4, 4)
    ids = torch.ones(1, 5).long()
    for mask in (
        AttentionMask(), AttentionMask(causal=False, window=2), AttentionMask(window=2, q_ids=ids, k_ids=ids),
        AttentionMask(window=2, softcap=1.0), AttentionMask(window=2, prefix_len=ids),
    ):
        with pytest.raises(KernelError, match="banded"):
            attention_banded(case.q, case.k, case.v, mask)
    with pytest.raises(KernelError, match="smaller than the window"):
        attention_banded(case.q, case.k, case.v, AttentionMask(window=4), block=3)


# -- flash -----------------------------------------------------------------------------------------------------------


def _flash_case(seed: int) -> Case:
    case = random_case(seed, plain=True)
    mask = replace(case.mask, window=None, prefix_len=None)
    values = case.k.detach().flip(1).clone().requires_grad_()
    return replace(case, v=values, mask=mask)


@pytest.mark.parametrize("seed", range(150))
def test_flash_equals_reference(seed: int) -> None:
    case = _flash_case(30000 + seed)
    check_equal(run(attention_flash, case), run(attention_reference, case), case, atol=1e-10)


def test_flash_runs_one_call_per_document(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    inner = torch.nn.functional.scaled_dot_product_attention

    def counted(*args: Tensor, **options: object) -> Tensor:
        calls.append(args[0].shape)
        assert torch._C._get_flash_sdp_enabled()
        assert not torch._C._get_math_sdp_enabled()
        assert not torch._C._get_mem_efficient_sdp_enabled()
        assert not torch._C._get_cudnn_sdp_enabled()
        return inner(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    ids = torch.tensor([[1, 1, 0, 1, 2, 2, 2, 0, 3]])
    case = replace(tensors(1, 9, 9, 2, 1, 4, 4), mask=AttentionMask(q_ids=ids, k_ids=ids))
    attention_flash(case.q, case.k, case.v, case.mask)
    assert [shape[2] for shape in calls] == [3, 3, 1]


@pytest.mark.filterwarnings("ignore:Flash attention kernel", "ignore:Both fused kernels")
def test_flash_never_runs_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch refuses the backend after all, the kernel says so."""
    case = tensors(1, 5, 5, 2, 1, 4, 4)
    monkeypatch.setattr("hybridtf.ops.attention.flash.why_not_flash", lambda request: None)
    with pytest.raises(KernelError, match="refuses its flash backend"):
        attention_flash(case.q, case.k, case.v, case.mask, dropout_p=0.1)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (AttentionMask(softcap=1.0), "softcap"), (AttentionMask(window=2), "window"),
        (AttentionMask(slopes=torch.ones(2)), "slopes"), (AttentionMask(sinks=torch.ones(2)), "sinks"),
        (AttentionMask(prefix_len=torch.ones(1, 5).long()), "prefix"),
        (AttentionMask(q_decay=torch.ones(1, 5, 2), k_decay=torch.ones(1, 5, 2)), "decay"),
        (AttentionMask(rel_q=torch.ones(1, 5, 2, 1), rel_bank=torch.ones(1, 2)), "relative"),
    ],
)
def test_flash_refuses_features_when_called(mask: AttentionMask, words: str) -> None:
    case = tensors(1, 5, 5, 2, 1, 4, 4)
    with pytest.raises(KernelError, match=words):
        attention_flash(case.q, case.k, case.v, mask)


def test_flash_refuses_unequal_widths_and_dropout_on_cpu_when_called() -> None:
    case = tensors(1, 5, 5, 2, 1, 4, 3)
    with pytest.raises(KernelError, match="one width; got 4 and 3"):
        attention_flash(case.q, case.k, case.v, case.mask)
    with pytest.raises(KernelError, match="no dropout on the CPU"):
        attention_flash(case.q, case.k, case.k, case.mask, dropout_p=0.1)


@pytest.mark.parametrize(
    ("device", "dtype", "sizes", "features", "words"),
    [
        ("cpu", torch.float32, {"head_dim": 64}, (), None),
        ("cpu", torch.float64, {"head_dim": 512, "v_dim": 512}, ("non_causal",), None),
        ("cpu", torch.float32, {"head_dim": 64, "v_dim": 32}, (), "one width"),
        ("cpu", torch.float32, {"head_dim": 64}, ("dropout",), "no dropout on the CPU"),
        ("cpu", torch.float32, {"head_dim": 64}, ("softcap", "window"), "softcap, window"),
        ("cuda", torch.float32, {"head_dim": 64}, (), "float16 or bfloat16, not float32"),
        ("cuda", torch.bfloat16, {"head_dim": 320}, (), "up to 256; got 320"),
        ("mps", torch.float16, {"head_dim": 64}, (), "no flash backend on mps"),
    ],
)
def test_flash_gives_its_reason(device: str, dtype: torch.dtype, sizes: dict, features: tuple, words: str | None):
    request = KernelRequest("attention", "train", dtype, torch.device(device), sizes, frozenset(features))
    reason = FLASH.why_not(request)
    assert reason is None if words is None else reason is not None and words in reason


def test_flash_on_packed_rows_equals_each_document_alone() -> None:
    ids = packed_ids(random.Random(5), 3, 40)
    case = replace(tensors(3, 40, 40, 4, 2, 8, 8), mask=AttentionMask(q_ids=ids, k_ids=ids))
    out = attention_flash(case.q, case.k, case.v, case.mask)
    for row in range(3):
        for document in sorted(set(ids[row].tolist()) - {0}):
            at = (ids[row] == document).nonzero()[:, 0]
            alone = attention_flash(*(x[row, at][None] for x in (case.q, case.k, case.v)), AttentionMask())
            torch.testing.assert_close(out[row, at][None], alone, atol=1e-12, rtol=0)
