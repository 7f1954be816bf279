"""Operations: what is planned from shapes against what is counted, by another counter, while it runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridtf.cost import count_flops
from hybridtf.cost.flops import CountWork
from hybridtf.cost.live_bytes import WithoutMemory
from hybridtf.testing import Subject
from tests.cost.executed import Executed
from tests.cost.registry import F32, MIXERS, subject_of, without_memory

LONGEST = {"hyena": 64}

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


ROUTED = ("moba", "nsa")
"""How many tiles a router's choice takes is not known before it is made: their plan is an estimate, their count is none."""


def counted(subject: Subject, t: int) -> tuple[CountWork, CountWork]:
    """:func:`planned`, on real tensors."""
    module = subject.build_plain(param_dtype=F32)
    inputs = subject.inputs(module, 2, t, dtype=F32).watched()
    forward, backward = CountWork(), CountWork("backward")
    with forward:
        y = subject.call(module, inputs).y
    with backward:
        y.sum().backward()
    return forward, backward


def check_against_what_runs(name: str, t: int) -> None:
    subject = subject_of(name)
    module = subject.build_plain(param_dtype=F32)
    inputs = subject.inputs(module, 2, t, dtype=F32).watched()
    # Once before: what the first call makes and keeps is no work of the others.
    with Executed() as forward:
        y = subject.call(module, inputs).y
    with Executed() as backward:
        y.sum().backward()
    plan = planned(name, t)
    if name in ROUTED:
        for mine, executed in zip(plan, (forward, backward), strict=True):
            assert mine.parts[mine.part].flops == pytest.approx(executed.flops, rel=0.25)
        plan = counted(subject, t)
    for mine, executed in zip(plan, (forward, backward), strict=True):
        work = mine.parts[mine.part]
        assert not work.unknown
        assert work.flops == pytest.approx(executed.flops, rel=0.01), work.flops_by_op()
        assert work.useful > 0


@pytest.mark.parametrize("name", MIXERS)
def test_planned_work_is_what_runs(name: str) -> None:
    check_against_what_runs(name, 19)


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
def test_planned_work_of_a_row_of_many_tiles_is_what_runs(name: str) -> None:
    check_against_what_runs(name, LONGEST.get(name, 577))


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
