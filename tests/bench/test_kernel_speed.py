"""Kernels of one op beside each other, on a call that a model makes."""

import functools

import pytest

from hybridtf.bench import measure_kernels
from hybridtf.core import Kernel, KernelError, UnknownNameError, using
from hybridtf.plugins import load_registries, make_plugin_manager
from hybridtf.report.detail_tables import kernel_table
from hybridtf.report.evidence import gather
from tests.bench.bench_cases import subject
from tests.bench.test_refusals import with_broken_ssd


def clock():
    ticks = iter(range(100_000))
    return lambda: float(next(ticks))


measure = functools.partial(measure_kernels, length=8, batch_size=2, repeats=12, warmup=0)


@pytest.mark.parametrize("phase", ["train", "prefill", "decode"])
def test_all_that_can_run_are_timed_the_models_own_first(phase):
    records = measure(subject("m a"), "ssd", phase=phase, clock=clock())
    assert [r["kernel"] for r in records] == ["chunked", "reference"]
    for r in records:
        assert (r["kind"], r["op"], r["phase"], r["median_s"]) == ("kernel", "ssd", phase, 1.0)
        assert r["shapes"]["q"][:2] == [2, 1 if phase == "decode" else 8]
        assert r["ratio"].items() >= {"against": "chunked", "time": 1.0, "verdict": "~"}.items()
        assert [c["passed"] for c in r["checks"]] == [True]
    table = kernel_table(gather(records))
    assert [(row["kernel"], row["median_us"], row["verdict"]) for row in table.to_rows()] == [
        ("chunked", 1e6, "~"), ("reference", 1e6, "~")
    ]


def test_the_first_that_is_asked_for_is_compared_with():
    records = measure(subject("m"), "ssd", kernels=("reference", "chunked"), phase="prefill", clock=clock())
    assert {r["ratio"]["against"] for r in records} == {"reference"}


def test_a_really_slower_kernel_is_called_slower():
    records = measure_kernels(subject("m"), "ssd", phase="prefill", length=128, repeats=12)
    chunked, reference = records
    assert reference["ratio"]["time"] > 2  # one token after the other
    assert reference["ratio"]["verdict"] in ("slower", "~")  # "~" where the machine is that busy
    assert (reference["ratio"]["verdict"] == "~") == bool(reference["ratio"]["refused"] or _covers(reference, chunked))


def _covers(record, first):
    low, high = record["ratio"]["interval"]
    return low <= 1 <= high or record["ratio"]["time"] <= 1 + first["noise"]["floor"]


def test_a_wrong_kernel_gets_no_line():
    with using(with_broken_ssd()):
        records = measure(subject("m"), "ssd", phase="prefill", clock=clock())
    wrong = next(r for r in records if r["kernel"] == "deaf")
    assert wrong["median_s"] is None
    assert "results are wrong by" in wrong["note"]
    assert all(r["median_s"] == 1.0 for r in records if r is not wrong)


def test_what_cannot_be_timed_says_why():
    with pytest.raises(UnknownNameError, match=r"does not call an op 'ssdd' in train.*Did you mean 'ssd'"):
        measure(subject("m"), "ssdd")
    with pytest.raises(UnknownNameError, match="no kernel named 'chunkd'"):
        measure(subject("m"), "ssd", kernels=("chunkd",))
    registries = load_registries(make_plugin_manager())
    registries.kernels.add(Kernel("ssd", "picky", 1, lambda request: "it needs a GPU", lambda: None))
    with using(registries), pytest.raises(KernelError, match=r"kernel 'picky' cannot run for train here \(it needs a GPU\)"):
        measure(subject("m"), "ssd", kernels=("picky",))
