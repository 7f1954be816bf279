"""Which records count, and one number out of several seeds."""

import math

import numpy as np
import pytest

from hybridtf.report import evidence as ev
from tests.report import sample


def test_mean_of_seeds_and_students_interval() -> None:
    score = ev.over_seeds([1.0, 2.0, 3.0])
    assert score is not None
    assert score.value == 2.0
    assert score.n_seeds == 3
    # s = 1, t(0.975, 2) = 4.3027
    assert score.low == pytest.approx(2 - 4.3027 / math.sqrt(3), abs=1e-3)
    assert score.high == pytest.approx(2 + 4.3027 / math.sqrt(3), abs=1e-3)


def test_seeds_that_agree_keep_the_width_of_their_own_intervals() -> None:
    score = ev.over_seeds([2.0, 2.0], [(1.9, 2.2), (1.7, 2.4)])
    assert score is not None
    assert (score.low, score.high) == pytest.approx((1.8, 2.3))


def test_one_seed_keeps_its_interval_and_none_is_no_value() -> None:
    assert ev.over_seeds([None, 2.0], [None, (1.0, 4.0)]) == ev.Measured(2.0, 1.0, 4.0, 1)
    assert ev.over_seeds([]) is None
    assert ev.over_seeds([None]) is None


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 15, 30])
def test_students_points_by_integration(freedom: int) -> None:
    half = ev.over_seeds([float(i) for i in range(freedom + 1)])
    assert half is not None
    assert half.half is not None
    values = np.arange(freedom + 1)
    point = half.half / (values.std(ddof=1) / math.sqrt(freedom + 1))
    # t = tan(a) sqrt(freedom) turns the density into cos(a)^(freedom - 1): its share within the point must be 95 %
    angle = np.linspace(0, math.pi / 2, 400_001)
    density = np.cos(angle) ** (freedom - 1)
    steps = (density[1:] + density[:-1]) / 2
    inside = steps[: np.searchsorted(angle, math.atan(point / math.sqrt(freedom)))].sum() / steps.sum()
    assert inside == pytest.approx(0.95, abs=1e-4)


def test_later_record_counts_and_order_stays() -> None:
    evidence = ev.gather([sample.quality("mamba2"), sample.quality("attention"), sample.quality("mamba2", shift=1.0)])
    assert evidence.labels == ["mamba2", "attention"]
    score = ev.quality(evidence.subjects[0], evidence.measure())
    assert score is not None
    assert score.value == pytest.approx(3.243)
    assert any("1 record was measured again later" in note for note in evidence.notes)


def test_unknown_kinds_newer_schemas_and_rubbish_are_named() -> None:
    good = sample.quality("mamba2")
    bad = [{**good, **wrong} for wrong in ({"kind": "telepathy"}, {"schema": 7}, {"schema": "x"}, {"recipe": None})]
    bad += [{"schema": 1}, "text"]
    evidence = ev.gather([*bad, good])
    assert evidence.labels == ["mamba2"]
    notes = " ".join(evidence.notes)
    for word in ("telepathy", "schema 7 is newer", "'x' is no version", "no JSON object", "no recipe", "kind None"):
        assert word in notes


def test_same_name_with_other_hashes_gets_labels_that_differ() -> None:
    records = [{**sample.quality("mamba2"), "recipe_hash": digest} for digest in ("0000000a", "0000000b", None)]
    assert len(set(ev.gather(records).labels)) == 3
    records = [{**sample.quality("mamba2"), "recipe_hash": digest} for digest in ("aaaaaaaa1", "bbbbbbbb2")]
    assert ev.gather(records).labels == ["mamba2 (aaaaaaa)", "mamba2 (bbbbbbb)"]


def test_condition_is_the_one_that_most_have_then_the_longest() -> None:
    measured = (("mamba2", 512), ("attention", 512), ("mamba2", 4096))
    records = [sample.speed(name, "train", length) for name, length in measured]
    assert ev.gather(records).condition("speed", "train") == (8, 512)
    assert ev.gather(records[1:]).condition("speed", "train") == (8, 4096)
    assert ev.gather(records).condition("speed", "decode") is None


def test_other_machines_are_said() -> None:
    slow = sample.speed("mamba2", "train")
    slow["environment"] = {**slow["environment"], "cpu": "another"}
    notes = ev.gather([sample.speed("attention", "train"), slow]).notes
    assert any("different machines" in note for note in notes)
    assert not ev.gather([sample.speed("attention", "train")]).notes


@pytest.mark.parametrize("items", [[2.0, None, 4.0], {"1": 2.0, "4": 4.0}, {"1x": 2.0, "4x": 4.0}])
def test_items_by_multiple(items: object) -> None:
    record = {**sample.extrapolation("mamba2"), "multiples": [1, 2, 4], "bits_per_byte": items}
    found = {m: value for m, value in ev.by_multiple(record, "bits_per_byte").items() if value is not None}
    assert found == {1.0: 2.0, 4.0: 4.0}


@pytest.mark.parametrize("value", [None, "3", True, math.nan, math.inf, [1]])
def test_what_is_no_number_is_not_measured(value: object) -> None:
    assert ev.number({"a": {"b": value}}, "a", "b") is None
    assert ev.number({"a": value}, "a", "b") is None
