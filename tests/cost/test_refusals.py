"""What a count of operations refuses, and the faults of others that it must not share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybridtf.bench import Subject
from hybridtf.bench.speed import measure_speed
from hybridtf.bench.utilization import utilization
from hybridtf.core import ConfigError
from hybridtf.cost import Device, count_flops, device_named, make_plan
from hybridtf.cost.flops import CountWork
from hybridtf.models import LanguageModelConfig
from hybridtf.recipe import Recipe
from tests.cost.registry import F32, subject_of

SLOW = Device("slow", {"float32": 100.0, "float64": 50.0}, 10.0, 10**9)
CUDA = torch.device("cuda")


@torch.library.custom_op("hybridtf_test::undeclared", mutates_args=())
def _undeclared(x: torch.Tensor) -> torch.Tensor:
    return x @ x.mT


@_undeclared.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-2])


_undeclared.register_autograd(lambda ctx, grad: torch.zeros(*grad.shape[:-1], 4))


class Plugin(nn.Module):
    """A model whose layer calls an op that a plugin brought without a formula, beside products that are known."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return self.head(x) + _undeclared(x).sum(-1, keepdim=True)


# -- 5: no utilization on an unknown GPU, or with an operator that was not counted -------------------------------------


def test_refusal_5_an_unknown_gpu_has_no_utilization_and_no_time() -> None:
    for gpu in ("NVIDIA H200 NVL", "NVIDIA H200 MIG 1g.18gb", "NVIDIA GeForce RTX 5090"):
        found = utilization(1e14, "bfloat16", CUDA, gpu)
        assert found["value"] is None
        assert gpu in found["note"]
    for name in ("rtx5090", "h200-nvl", "H200"):
        with pytest.raises(ConfigError, match=f"no device '{name}' in the table"):
            device_named(name)


def test_refusal_5_an_h200_is_no_a100() -> None:
    """Taken for one, its utilization would read 3.17 times too high."""
    found = utilization(494.5e12, "bfloat16", CUDA, "NVIDIA H200")
    assert found["value"] == pytest.approx(0.5)
    taken = utilization(494.5e12, "bfloat16", CUDA, "NVIDIA A100-SXM4-80GB")
    assert taken["value"] / found["value"] == pytest.approx(3.17, abs=0.01)


def test_refusal_5_no_utilization_of_what_was_not_counted() -> None:
    subject = Subject("plugin", Plugin, 7)
    (record,) = measure_speed(subject, phases=["prefill"], length=8, repeats=2, warmup=1, round_s=0.0, floor=False)
    assert record["flops"] is record["flops_per_s"] is record["mfu"]["value"] is None
    assert "hybridtf_test.undeclared" in record["note"]
    assert utilization(record["flops_per_s"], "bfloat16", CUDA, "NVIDIA H200")["note"] == "the operations are not known"


# -- 9: what declares no cost is unknown in every total that it enters -------------------------------------------------


def test_refusal_9_a_component_without_a_cost_is_unknown_in_every_total() -> None:
    found = make_plan(Subject("plugin", Plugin, 7), lengths=[8], batch_size=2, device=SLOW, phases=["train", "prefill"])
    for phase, parts in (("train", ("forward",)), ("prefill", ("forward",))):
        row = found["phases"][phase]["8"]
        assert row["unknown"] == ["hybridtf_test.undeclared"]
        assert row["seconds"] is row["bound"] is None
        for part in parts:
            assert row["flops"][part] is row["useful_flops"][part] is None
        assert row["bytes"]["peak"] > 0  # bytes are known all the same


def test_refusal_9_a_count_is_refused_and_not_zero() -> None:
    with pytest.raises(ConfigError, match=r"operations are unknown: no formula of hybridtf_test\.undeclared"):
        count_flops(lambda: _undeclared(torch.ones(3, 3)) @ torch.ones(3, 5))


# -- faults of others --------------------------------------------------------------------------------------------------


def test_attention_of_the_cpu_is_counted_in_a_model() -> None:
    """torch's FlopCounterMode counts none: a row twice as long would take twice the operations, and no more."""
    blocks = {"a": {"mixer": {"type": "attention", "n_heads": 2}}}
    model = LanguageModelConfig(vocab_size=11, d_model=16, pattern="a", blocks=blocks)
    one = Subject.from_recipe(Recipe(model=model), "a")
    rows = make_plan(one, lengths=[1024, 2048], batch_size=1, device=SLOW, phases=["prefill"])["phases"]["prefill"]
    flash = [rows[n]["by_op"]["forward"]["aten._scaled_dot_product_flash_attention_for_cpu"] for n in ("1024", "2048")]
    # Blocks of 512 keys: of the four (sixteen) squares three (ten) are computed; half of all, and half a token more, are seen.
    assert flash == [2 * 2 * 16 * 3 * 512**2, 2 * 2 * 16 * 10 * 512**2]
    useful = [rows[n]["flops"]["forward"] - rows[n]["useful_flops"]["forward"] for n in ("1024", "2048")]
    assert useful == [2 * 2 * 16 * (k * 512**2 - n * (n + 1) // 2) for k, n in ((3, 1024), (10, 2048))]


@pytest.mark.parametrize("name", ["gated_delta_net", "delta_net", "mamba2", "mamba"])
def test_a_state_update_is_counted_forward_and_backward(name: str) -> None:
    """Not the forward alone, and not the projections alone."""
    subject = subject_of(name)
    module = subject.build_plain(param_dtype=F32)
    inputs = subject.inputs(module, 1, 64, dtype=F32).watched()
    counter = CountWork()
    with counter:
        y = subject.call(module, inputs).y
        counter.part = "backward"
        y.sum().backward()
    updates = {
        part: sum(n for op, n in work.flops_by_op().items() if op.startswith("hybridtf."))
        for part, work in counter.parts.items()
    }
    assert updates["forward"] > 0
    assert 1.5 < updates["backward"] / updates["forward"] < 6
