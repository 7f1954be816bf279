"""What the speed harness refuses to say, one test each: every one of these was seen wrong in some published benchmark."""

import functools

import pytest
import torch

from hybridtf.bench import Subject, measure_speed, noise
from hybridtf.bench.gpu_state import FIELDS, parsed, refusals
from hybridtf.bench.speed import speed_fields
from hybridtf.bench.timing import Timed
from hybridtf.bench.utilization import utilization
from hybridtf.core import ConfigError, Kernel, Registries, active, using
from hybridtf.core.kernels import always
from hybridtf.cost.phases import DecodeStep, make_step
from hybridtf.plugins import load_registries, make_plugin_manager
from hybridtf.report import detail_tables
from hybridtf.report.evidence import gather
from tests.bench.bench_cases import subject

measure = functools.partial(measure_speed, length=8, repeats=2, warmup=0, floor=False)


def broken_ssd(q, k, v, log_a, **more):
    """Right in its shapes and sums, and deaf to the decay."""
    return active().kernels.get("ssd", "chunked").load()(q, k, v, torch.zeros_like(log_a), **more)


def load_broken():
    return broken_ssd


def with_broken_ssd() -> Registries:
    registries = load_registries(make_plugin_manager())
    registries.kernels.add(Kernel("ssd", "deaf", 99, always, load_broken))
    return registries


def test_no_speed_of_a_wrong_kernel():
    with using(with_broken_ssd()):
        records = measure(subject("m", "deaf"), against=[subject("a", "right")], phases=("train", "prefill", "decode"))
    for wrong, right in zip(records[::2], records[1::2], strict=True):
        assert (wrong["tokens_per_s"], wrong["median_s"], wrong["times"], wrong["ratio"]) == (None, None, [], None)
        assert f"kernel 'deaf' of ssd in {wrong['phase']}: results are wrong by" in wrong["note"]
        check = next(c for c in wrong["checks"] if c["op"] == "ssd")
        assert (check["kernel"], check["passed"], check["dtype"]) == ("deaf", False, "float32")
        assert check["shapes"]["q"][:2] == [1, 1 if wrong["phase"] == "decode" else 8]
        assert right["tokens_per_s"] > 0
        assert right["checks"]
        assert all(c["passed"] and c["error"] <= c["tolerance"] for c in right["checks"])
    table = detail_tables.speed_table(gather(records))
    assert [row["tokens_per_s"] for row in table.to_rows() if row["recipe"] == "deaf"] == [None] * 3
    assert any("kernel 'deaf' of ssd" in note for note in table.notes)


def test_no_comparison_of_compiled_with_eager():
    def build():
        return torch.compile(subject("a").build(), backend="eager")

    compiled = Subject("compiled", build, 257)
    with pytest.raises(ConfigError, match="compiled is compiled, eager is not"):
        measure(subject("a", "eager"), against=[compiled], phases=("prefill",))
    alone = measure(compiled, phases=("prefill",))[0]
    assert alone["compiled"] is True
    assert alone["checks"], "the kernels of a compiled model are checked too"


def test_no_number_of_prefill_and_decode_mixed():
    one = subject("a")
    with pytest.raises(ConfigError, match="no phase 'generation'"):
        measure(one, phases=("generation",))
    step = make_step("decode", one, one.build(), 1, 8)
    assert isinstance(step, DecodeStep)
    seen = []
    step.model.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    step.prepare()
    assert seen == [8]  # the prompt is read before the clock starts
    seen.clear()
    step.run()
    assert set(seen) == {1}


def test_no_utilization_of_an_unknown_gpu_or_an_unknown_rate():
    cuda = torch.device("cuda")
    known = utilization(98.9e12, "bfloat16 by autocast", cuda, "NVIDIA H200")
    assert known["value"] == pytest.approx(0.1)
    for name in ("NVIDIA H200 MIG 1g.18gb", "NVIDIA H100 PCIe", "NVIDIA B200"):
        assert utilization(1e12, "bfloat16", cuda, name)["value"] is None
        assert name in utilization(1e12, "bfloat16", cuda, name)["note"]
    assert "int8" in utilization(1e12, "int8", cuda, "NVIDIA H200")["note"]
    assert utilization(None, "bfloat16", cuda, "NVIDIA H200")["note"] == "the operations are not known"
    assert utilization(1e9, "float32", torch.device("cpu"), None)["value"] is None


def test_no_rate_of_operations_that_no_formula_counts():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.eye(5))

        def forward(self, ids, segments=None):
            return torch.linalg.solve(self.weight, self.weight)[ids]

    found = measure(Subject("odd", Odd, 5), phases=("prefill",))[0]
    assert (found["flops"], found["flops_per_s"]) == (None, None)
    assert "no formula for the operations of aten._linalg" in found["note"]
    assert found["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("times", "reason"), [([1.0] * 9, "9 rounds are too few"), ([1.0, 1.2] * 10, "times differ by 18.2 %"), ([1.0] * 20, None)]
)
def test_no_claim_from_few_or_scattered_rounds(times, reason):
    refused = speed_fields(1, Timed(times, [[t] for t in times]))["refused"]
    assert (reason is None and refused == []) or reason in refused[0]


GOOD = "GPU-1, 560.35.03, 1980, 1980, 45, 300.1, 700.0, 0x0000000000000000, Disabled"


@pytest.mark.parametrize(
    ("facts", "processes", "reason"),
    [
        (GOOD, "7\n", None),
        (GOOD.replace("0x0000000000000000", "0x0000000000000001"), "7\n", None),  # idle, as before the first run
        (GOOD.replace(", 1980, 1980", ", 1200, 1980"), "7\n", "clock fell to 1200 of 1980"),
        (GOOD.replace("0x0000000000000000", "0x0000000000000004"), "7\n", "throttled"),
        (GOOD, "7\n8\n", "1 other processes use the GPU"),
        (GOOD.replace(", 1980, 1980", ", [N/A], [N/A]"), "7\n", "clocks are not known"),
        ("one, two", "", "clocks are not known: nvidia-smi gave 2 values for 9"),
    ],
)
def test_no_claim_from_a_gpu_that_is_throttled_or_shared(facts, processes, reason):
    assert len(FIELDS) == 9
    state = parsed(facts, processes, own=7)
    found = refusals(state, state)
    assert (reason is None and found == []) or reason in found[0]
    assert refusals(None, None) == []


def test_no_claim_from_runs_near_the_resolution_of_the_clock():
    timed = Timed([1e-6] * 20, [[1e-6]] * 20)
    assert speed_fields(1, timed, resolution=4e-8)["refused"] == []
    assert "shorter than 20 steps of the clock" in speed_fields(1, timed, resolution=6e-8)["refused"][0]


def test_no_warm_number_without_its_cold_partner():
    with pytest.raises(ConfigError, match="only beside the one with cold caches"):
        speed_fields(1, Timed([], [[1.0]]))
    found = measure(subject("a"), phases=("prefill",))[0]
    assert len(found["cold"]["times"]) == len(found["times"]) == 2
    row = detail_tables.speed_table(gather([found])).to_rows()[0]
    assert row["cold_tokens_per_s"] == pytest.approx(8 / found["cold"]["median_s"])


def test_a_refused_claim_prints_a_tilde_and_its_reason_and_the_run_goes_on():
    records = measure(subject("a", "one"), against=[subject("m", "two")], phases=("prefill",))
    assert [r["ratio"]["verdict"] for r in records] == ["~", "~"]
    table = detail_tables.speed_table(gather(records))
    assert [row["verdict"] for row in table.to_rows()] == ["~", "~"]
    assert any(f"no verdict: 2 rounds are too few: at least {noise.MIN_ROUNDS}" in note for note in table.notes)
    assert all(r["tokens_per_s"] > 0 for r in records)
