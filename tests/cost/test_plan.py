"""Plans: long rows against traced ones, bytes against counts, times by hand, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from hybridtf.bench import Subject, count_bytes
from hybridtf.cli.plan import print_plan
from hybridtf.core import ConfigError
from hybridtf.cost import DEVICES, Device, Work, attention_sibling, device_named, make_plan
from hybridtf.cost.roofline import roofline
from hybridtf.cost.trace import Tracer, polynomial, reach_of
from hybridtf.models import LanguageModelConfig
from hybridtf.ops.spans import by_device
from hybridtf.recipe import Recipe
from tests.bench.bench_cases import BLOCKS, subject
from tests.cli.helpers import as_json, refused, write_recipe

SLOW = Device("slow", {"float32": 100.0, "float64": 50.0}, 10.0, 10**9)


@pytest.mark.parametrize("pattern", ["a", "m w"])
@pytest.mark.parametrize("phase", ["train", "prefill"])
def test_a_long_row_is_carried_on_to_the_operation(pattern: str, phase: str) -> None:
    tracer = Tracer(subject(pattern), phase, reach=64)  # type: ignore[arg-type]
    found, traced = tracer.at(4133), tracer._trace(4133, 1)
    assert (found.exact, traced.exact) == (False, True)
    for part, work in traced.work.items():
        assert found.work[part].flops_by_op() == work.flops_by_op()
    assert found.footprint.peak == pytest.approx(traced.footprint.peak, rel=0.05)
    assert found.footprint.weights == traced.footprint.weights


@pytest.mark.parametrize("mixer", ["forgetting_attention", "dilated", "griffin_recurrent"])
def test_what_tiles_and_sweeps_add_is_carried_on_within_a_hundredth(mixer: str) -> None:
    """They are no polynomial of the length; what is asked of them is."""
    blocks = {"x": {"mixer": {"type": mixer, "n_heads": 2}}}
    config = LanguageModelConfig(vocab_size=11, d_model=16, pattern="x", blocks=blocks, max_seq_len=1 << 15)
    tracer = Tracer(Subject.from_recipe(Recipe(model=config), "x"), "prefill", reach_of(config))
    for length in (8229, 12000):
        found, traced = tracer.at(length), tracer._trace(length, 1)
        assert not found.exact
        assert found.work["forward"].flops == pytest.approx(traced.work["forward"].flops, rel=0.01)


def test_what_is_no_polynomial_is_traced() -> None:
    blocks = {"h": {"mixer": {"type": "hyena"}}}
    config = LanguageModelConfig(vocab_size=11, d_model=8, pattern="h", blocks=blocks, max_seq_len=4096)
    tracer = Tracer(Subject.from_recipe(Recipe(model=config), "h"), "prefill")
    assert tracer.at(2500).exact


def test_a_row_is_not_carried_on_from_within_a_window() -> None:
    blocks = {"w": {"mixer": {"type": "attention", "n_heads": 2, "window": 1500}}}
    assert reach_of(LanguageModelConfig(vocab_size=11, d_model=8, pattern="w", blocks=blocks)) == 1500
    wide = {"m": BLOCKS["m"] | {"channel_mixer": {"type": "swiglu", "d_ff": 9000}}}
    assert reach_of(LanguageModelConfig(vocab_size=11, d_model=16, pattern="m", blocks=wide)) == 16  # a width is no length
    tracer = Tracer(subject("a"), "prefill", 1500)
    assert tracer.at(2600).exact  # too near for four lengths past the window
    assert not tracer.at(1 << 20).exact
    assert min(length for length, _ in tracer._seen) >= 1500


def test_polynomials_are_exact() -> None:
    values = [3 * n * n - 5 * n + 7 for n in range(9)]
    assert [polynomial(values, n) for n in range(9)] == values


def test_the_plan_is_what_is_counted() -> None:
    one = subject("m a")
    found = make_plan(one, lengths=[33], batch_size=2, device=SLOW)
    assert (found["validated"], found["params"]["total"]) == (False, sum(p.numel() for p in one.build().parameters()))
    for phase in ("train", "prefill"):
        row = found["phases"][phase]["33"]
        counted = vars(count_bytes(one, phase, 2, 33))  # type: ignore[arg-type]
        assert row["bytes"] == {name: size for name, size in counted.items() if name != "reserved"}
        assert (row["traced"], row["fits"], row["unknown"]) == (True, True, [])
        assert row["seconds"] > 0
    train = found["phases"]["train"]["33"]["flops"]
    assert 1.8 < train["backward"] / train["forward"] < 3
    assert train["update"] == 0
    longest = found["fits"]["prefill"]["length"]
    assert Tracer(one, "prefill", 64).at(longest, 2).footprint.peak <= SLOW.memory


def test_blocks_have_the_sizes_of_the_device_that_is_planned_for() -> None:
    def work(device: Device) -> int:
        found = make_plan(subject("w"), lengths=[1024], batch_size=1, device=device, phases=("prefill",))
        return int(found["phases"]["prefill"]["1024"]["flops"]["forward"])

    # Blocks of 16 tokens on a CPU and of 64 on a GPU, of a window of 7: what the band hides is computed too.
    own = Tracer(subject("w"), "prefill").at(1024).work["forward"].flops
    assert work(replace(SLOW, kind="cpu")) == own < work(SLOW)
    assert by_device(torch.device("cpu"), 1, 2) == 1


def test_what_does_not_fit_without_a_token_is_not_searched() -> None:
    found = make_plan(subject("m"), lengths=[8], batch_size=1, device=replace(SLOW, memory=1000), phases=("train",))
    assert found["fits"]["train"] == {"length": 0, "at_least": False}


def test_times_by_hand() -> None:
    work = Work({("mm", "float32"): (1000, 20), ("mm", "float64"): (100, 90), ("add", "float32"): (0, 10)})
    time = roofline([work], SLOW)  # 10 s by products, 9 s and 1 s by bytes
    assert (time.seconds, time.bound) == (pytest.approx(20.0), "memory")
    work.unknown.add("mine")
    assert roofline([work], SLOW).seconds is None


def test_an_unknown_operator_makes_the_plan_unknown() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5, 5))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.linalg.cholesky_ex(self.weight).L[ids]

    found = make_plan(Subject("odd", Odd, 5), lengths=[4], batch_size=1, device=SLOW, phases=["prefill"])
    row = found["phases"]["prefill"]["4"]
    assert row["unknown"] == ["aten.linalg_cholesky_ex"]
    assert row["flops"] == {"forward": None}
    assert row["seconds"] is row["bound"] is None


def test_the_sibling_has_attention_everywhere() -> None:
    mixer = {**BLOCKS["m"]["mixer"], "chunk_size": 256}  # few chunks are soon traced
    blocks = {"m": {**BLOCKS["m"], "mixer": mixer}, "w": BLOCKS["w"]}
    config = LanguageModelConfig(vocab_size=11, d_model=16, pattern="m w", blocks=blocks)
    sibling = attention_sibling(config)
    assert sibling is not None
    assert [sibling.blocks[name].mixer.to_dict()["n_heads"] for name in "mw"] == [1, 1]  # type: ignore[attr-defined]
    assert sibling.blocks["m"].channel_mixer == config.blocks["m"].channel_mixer  # type: ignore[attr-defined]
    assert attention_sibling(sibling) is None
    found = make_plan(
        Subject.from_recipe(Recipe(model=config), "x"), lengths=[8], batch_size=1, device=SLOW, phases=["prefill"],
        sibling=Subject.from_recipe(Recipe(model=sibling), "y"),
    )
    state = found["state_bytes"]["8"]
    assert state["allocated"] <= 2 * 2 * 16 * 4 * found["crossover"]["state"]
    assert 64 <= found["crossover"]["flops"] < 1 << 20


def test_a_device_is_never_taken_for_another() -> None:
    assert [device_named(name).name for name in DEVICES] == ["h200", "h100", "a100", "cpu"]
    assert not any(device_named(name).validated for name in DEVICES)
    with pytest.raises(ConfigError, match="no device 'h20'"):
        device_named("h20")


def test_the_command(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    recipe = write_recipe(tmp_path, "tiny", ("chunk_size = 16", "chunk_size = 256"))
    found = as_json("plan", recipe, "--length", "1k", "--batch-size", 2, "--dtype", "bfloat16", "--device", "a100")
    assert set(found["phases"]) == {"train", "prefill", "decode"}
    assert (found["batch_size"], found["device"], found["dtype"]) == (2, "a100", "bfloat16")
    assert found["phases"]["decode"]["1024"]["bytes"]["state"] > found["state_bytes"]["1024"]["conv"] > 0
    print_plan(found)
    text = capsys.readouterr().out
    assert "unvalidated" in text
    assert "less than with attention in every layer" in text
    assert "--length 3x: is no length" in refused("plan", recipe, "--length", "3x")
    assert "no device 'tpu'" in refused("plan", recipe, "--device", "tpu")
    assert "--dtype int8" in refused("plan", recipe, "--dtype", "int8")
