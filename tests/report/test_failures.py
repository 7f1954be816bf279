"""Refusal: out of memory, timed out, not finite and not run are four answers, none of them zero and none averaged over."""

import math

import pytest

from hybridtf.report import compare_table, failures
from hybridtf.report.detail_tables import memory_table, quality_table, speed_table
from hybridtf.report.differences import difference_tables
from hybridtf.report.evidence import gather
from hybridtf.report.failures import NOT_FINITE, NOT_RUN, OUT_OF_MEMORY, TIMED_OUT
from tests.report import sample


def without(record: dict, note: str) -> dict:
    """A speed record of a run that gave no number."""
    return {**record, "tokens_per_s": None, "median_s": None, "spread_s": None, "times": [], "note": note}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"failed": "NonFiniteError: the loss at step 3 is nan"}, NOT_FINITE),
        ({"failed": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"}, OUT_OF_MEMORY),
        ({"failed": "out_of_memory"}, OUT_OF_MEMORY),
        ({"failed": "timed_out"}, TIMED_OUT),
        ({"failed": "signal 9"}, failures.CRASHED),
        ({"failed": None}, None),
        ({"result": "non_finite"}, NOT_FINITE),
        ({"result": "not_run"}, NOT_RUN),
        ({"result": "ok"}, None),
    ],
)
def test_what_harnesses_say_is_one_of_the_words(fields: dict, said: str | None) -> None:
    assert failures.outcome({**sample.train("mamba2"), **fields}) == said


def test_refusal_12_four_answers_are_four_words_and_never_a_number() -> None:
    names = {"attention": "out of memory", "mamba2": "timed out after 60 s", "hybrid-3m1a": "the rate is not finite"}
    records = [without(sample.speed(name, "train"), note) for name, note in names.items()]
    records.append(sample.common("train", "unmeasured"))
    rows = compare_table(records).to_rows()
    assert [row["train_tokens_per_s"] for row in rows] == [OUT_OF_MEMORY, TIMED_OUT, NOT_FINITE, None]
    lines = compare_table(records).to_markdown().split("\n")[2:6]
    for line, said in zip(lines, (OUT_OF_MEMORY, TIMED_OUT, NOT_FINITE, NOT_RUN), strict=True):
        assert said in line
        assert " 0 " not in line
    assert [row["tokens_per_s"] for row in speed_table(gather(records)).to_rows()] == [OUT_OF_MEMORY, TIMED_OUT, NOT_FINITE]


def test_refusal_12_no_mean_over_the_seeds_that_went_well() -> None:
    records = [sample.quality("mamba2", 0), sample.quality("mamba2", 1), sample.failed("mamba2", "NonFiniteError: nan", 2)]
    records += [sample.quality("attention", seed) for seed in range(3)]
    row, other = compare_table(records).to_rows()
    assert row["bits_per_byte"] == "not finite in 1 of 3 seeds"
    assert other["bits_per_byte"] == pytest.approx(2.284)
    assert quality_table(gather(records)).to_rows()[0]["score"] == "not finite in 1 of 3 seeds"
    (table,) = difference_tables(gather(records))
    assert table.to_rows()[0]["difference"] is None
    assert table.to_rows()[0]["verdict"] == "unknown"


def test_a_training_that_was_tried_again_counts_as_it_ended() -> None:
    records = [sample.failed("mamba2", "out_of_memory"), sample.train("mamba2"), sample.quality("mamba2")]
    assert compare_table(records).to_rows()[0]["bits_per_byte"] == 2.243


def test_a_nan_in_a_record_is_not_finite() -> None:
    record = {**sample.quality("mamba2"), "value": math.nan}
    assert compare_table([record]).to_rows()[0]["bits_per_byte"] == NOT_FINITE


def test_memory_that_did_not_fit() -> None:
    parts = dict.fromkeys(("weights", "gradients", "optimizer", "activations", "state", "peak"))
    record = {**sample.memory("mamba2"), **parts, "note": "out of memory: train at 8 x 512 tokens does not fit the device"}
    assert memory_table(gather([record])).to_rows()[0]["peak"] == OUT_OF_MEMORY
    assert compare_table([record]).to_rows()[0]["peak_train_bytes"] == OUT_OF_MEMORY


def test_a_speed_within_the_noise_is_a_tilde_and_older_records_keep_their_ratio() -> None:
    told = {**sample.speed("mamba2", "train"), "ratio": {"against": "attention", "time": 1.01, "verdict": "~"}}
    old = {**sample.speed("attention", "train"), "ratio": {"against": "mamba2", "time": 1.25, "low": 1.2, "high": 1.3}}
    rows = speed_table(gather([told, old])).to_rows()
    assert [row["times_as_long"] for row in rows] == [1.01, 1.25]
    assert [row["verdict"] for row in rows] == ["~", None]


def test_the_recorded_points_of_the_time_give_the_spread() -> None:
    record = {**sample.speed("mamba2", "train"), "tokens": 4096, "p20_s": 0.40, "p80_s": 0.45}
    row = compare_table([record]).to_rows()[0]
    assert (row["train_tokens_per_s_low"], row["train_tokens_per_s_high"]) == pytest.approx((4096 / 0.45, 4096 / 0.40))
