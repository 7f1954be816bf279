"""Operations: what is planned from shapes against what is counted, by another counter, while it runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridtf.cost import count_flops
from hybridtf.cost.flops import CountWork
from hybridtf.cost.live_bytes import WithoutMemory
from tests.cost.executed import Executed
from tests.cost.registry import F32, MIXERS, subject_of, without_memory

BY_THE_RULE = frozenset({
    "linear_scan", "selective_scan_chunked",  # elementwise: the recurrence counts, which the other counter does not see
    # What the rule lets a query see counts; what runs are whole tiles, masked where the rule ends.
    "block_sparse_attention", "choose_blocks", "choose_tokens", "important_blocks",
    "attention_blockwise",  # the products of a learned bias do not count
})
"""Ops whose formulas count what is asked for, and not the operators inside: around them all is compared."""


def planned(name: str, t: int) -> tuple[CountWork, CountWork]:
    """Forward and backward on shapes."""
    subject, world = subject_of(name), WithoutMemory()
    forward, backward = CountWork(), CountWork("backward")
    with world.enter():
        module = world.adopt(subject.build_plain(param_dtype=F32))
        inputs = without_memory(world, subject.inputs(module, 2, t, dtype=F32))
        with forward:
            y = subject.call(module, inputs).y
        with backward:
            y.sum().backward()
    return forward, backward


@pytest.mark.parametrize("name", MIXERS)
def test_planned_work_is_what_runs(name: str) -> None:
    t = 19
    subject = subject_of(name)
    module = subject.build_plain(param_dtype=F32)
    inputs = subject.inputs(module, 2, t, dtype=F32).watched()
    # Once before: what the first call makes and keeps is no work of the others.
    with Executed(BY_THE_RULE) as forward:
        y = subject.call(module, inputs).y
    with Executed(BY_THE_RULE) as backward:
        y.sum().backward()
    for mine, executed in zip(planned(name, t), (forward, backward), strict=True):
        work = mine.parts[mine.part]
        assert not work.unknown
        by_rule = sum(n for (op, _), (n, _) in work.by_op.items() if _name(op) in BY_THE_RULE)
        assert work.flops - by_rule == pytest.approx(executed.flops, rel=0.01), (work.flops_by_op(), executed.flops)
        assert work.flops > 0


def _name(op: str) -> str:
    return op.removeprefix("hybridtf.").removesuffix("_backward")


@torch.library.custom_op("hybridtf_test::secret", mutates_args=())
def _secret(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def test_an_operator_without_a_formula_is_unknown_and_not_free() -> None:
    with CountWork() as counter:
        _secret(torch.ones(3, 3)) @ torch.ones(3, 5)
        torch.linalg.qr(torch.ones(3, 3))
    work = counter.parts["forward"]
    assert work.unknown == {"hybridtf_test.secret", "aten.linalg_qr"}
    assert work.flops_by_op() == {"aten.mm": 2 * 3 * 3 * 5}


def test_attention_on_the_cpu_is_not_free() -> None:
    """torch's own counter knows no formula of it."""
    q = torch.ones(2, 4, 8, 6, requires_grad=True)

    def attend() -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    forward = 2 * 2 * (2 * 4 * 8 * 8 * 6)
    assert count_flops(attend) == forward
    assert count_flops(lambda: attend().sum().backward()) == forward * 7 // 2


def test_bytes_moved_are_those_of_the_tensors() -> None:
    x, w = torch.ones(4, 8), torch.ones(8, 16)
    with CountWork() as counter:
        y = (x @ w).t()
        y.expand(2, 16, 4) + 1.0
        nn.functional.embedding(torch.tensor([1, 2]), torch.ones(1000, 8))
    moved = {op: n for (op, _), (_, n) in counter.parts["forward"].by_op.items() if not op.startswith("aten.ones")}
    assert moved["aten.mm"] == 4 * (4 * 8 + 8 * 16 + 4 * 16)
    assert moved["aten.add"] == 4 * (16 * 4 + 2 * 16 * 4)
    assert moved["aten.embedding"] == 2 * 4 * 2 * 8
    assert "aten.t" not in moved
