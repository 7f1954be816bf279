"""The readable FlashAttention: equal to the definition for any tiles, linear in memory, and clear about what it leaves out."""

from __future__ import annotations

import pytest
import torch

from hybridtf.core.errors import KernelError
from hybridtf.ops.attention import AttentionMask, attention_reference
from hybridtf.ops.attention.tiled import attention_tiled
from tests.ops.attention_cases import check_equal, random_case, run, tensors
from tests.ops.live_bytes import Peak


@pytest.mark.parametrize("seed", range(60))
def test_equals_reference(seed: int) -> None:
    case = random_case(5000 + seed, plain=True)
    got = run(attention_tiled, case, tile=(1, 2, 5, 64)[seed % 4])
    check_equal(got, run(attention_reference, case), case, atol=1e-11)


def test_large_scores_stay_finite() -> None:
    case = tensors(1, 17, 17, 2, 1, 4, 4)
    case.q.data.mul_(1e4)
    got = run(attention_tiled, case, tile=4)
    assert all(bool(x.isfinite().all()) for x in got)
    check_equal(got, run(attention_reference, case), case, atol=1e-6)


def test_memory_is_linear_in_length() -> None:
    def peak(t: int) -> int:
        case = tensors(1, t, t, 2, 2, 8, 8, dtype=torch.float32)
        with Peak() as meter:
            attention_tiled(case.q, case.k, case.v, case.mask).sum().backward()
        return meter.most

    assert peak(1024) < 2.2 * peak(512)
    assert peak(1024) < 1024 * 1024 * 4  # one head's scores


def test_what_it_leaves_out_is_named() -> None:
    case = tensors(1, 3, 3, 1, 1, 2, 2)
    with pytest.raises(KernelError, match="the tiled lesson has no softcap"):
        attention_tiled(case.q, case.k, case.v, AttentionMask(softcap=1.0))
    with pytest.raises(KernelError, match="the tiled lesson has no dropout"):
        attention_tiled(case.q, case.k, case.v, case.mask, dropout_p=0.1)
