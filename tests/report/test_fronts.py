"""Fronts, learning rates and recall beyond the trained length: the points against numbers worked out by hand."""

import itertools
import math
import random
import xml.etree.ElementTree as ET

import pytest

from hybridtf.report import front_data, length_data, marks
from hybridtf.report.chart import Chart, to_svg
from hybridtf.report.charts import build_charts
from hybridtf.report.differences import pairwise
from hybridtf.report.evidence import gather
from tests.report import sample


@pytest.mark.parametrize("higher", [True, False])
def test_the_front_is_what_nobody_beats(higher: bool) -> None:
    draw = random.Random(3)
    for _ in range(60):
        rows = [{"cost": draw.randint(1, 6), "value": draw.randint(1, 6), "place": i} for i in range(draw.randint(1, 12))]
        sign = 1 if higher else -1
        alone = {
            row["place"] for row in rows
            if not any(
                o["cost"] <= row["cost"] and sign * o["value"] >= sign * row["value"]
                and (o["cost"], o["value"]) != (row["cost"], row["value"])
                for o in rows
            )
        }  # fmt: skip
        found = front_data.front(rows, higher)
        assert {row["place"] for row in found} == alone
        for one, two in itertools.pairwise(found):
            assert one["cost"] <= two["cost"]
            assert sign * one["value"] <= sign * two["value"]


def test_points_of_all_three_costs() -> None:
    evidence = gather(sample.records())
    measure = evidence.measure()
    first = [rows(evidence, measure)[0] for rows in (front_data.flops_rows, front_data.decode_rows)]
    assert [row["cost"] for row in first] == pytest.approx([700 * 4096 * 6 * 7.1e6, 1 / 402.0])
    assert all(row["value"] == 2.284 and row["record"].startswith("quality-attention-sotu-seed0-") for row in first)


def test_a_recipe_of_which_a_seed_failed_has_no_point() -> None:
    evidence = gather([*sample.records(), sample.failed("mamba2", "out_of_memory", 1)])
    assert {row["recipe"] for row in front_data.state_rows(evidence, evidence.measure())} == {"attention", "hybrid-3m1a"}


def test_learning_rates_and_the_one_that_was_chosen() -> None:
    rates = (1e-4, 1e-3, 1e-2)
    records = [sample.tried(name, rate, 1e-3, seed) for name in ("attention", "mamba2") for rate in rates for seed in (0, 1)]
    evidence = gather(records)
    (sweep,) = front_data.sweeps(evidence)
    found = [(r["lr"], r["chosen"]) for r in sweep.rows if r["recipe"] == "mamba2"]
    assert found == [(1e-4, False), (1e-3, True), (1e-2, False)]
    assert sweep.rows[0]["value"] == pytest.approx(2.284 + 0.2)
    # the score is that of the chosen rate, and no mean over rates
    assert [d.difference.value for d in pairwise(evidence, sweep.measure) if d.difference] == pytest.approx([0.041])
    unsaid = gather([sample.tried("mamba2", rate) for rate in rates])
    assert front_data.state_rows(unsaid, unsaid.measure()) == []
    charts = {chart.name: chart for chart in build_charts(evidence)}
    ET.fromstring(to_svg(charts["learning_rates"].file_spec()))


def test_recall_by_length_names_what_did_not_fit() -> None:
    evidence = gather([sample.beyond("attention"), sample.beyond("mamba2")])
    rows, absent = length_data.recall_rows(evidence, "mqar")
    assert absent == ["attention at 1,024 tokens: out of memory"]
    assert [(r["length"], r["ratio"]) for r in rows[:4]] == [(64, 1.0), (128, 2.0), (256, 4.0), (512, 8.0)]
    assert length_data.chance_rows(rows)[0] == {"length": 64, "value": 1 / 128}
    caption = next(c for c in build_charts(evidence) if c.name == "recall_by_length").caption
    assert "trained length, 64 tokens" in caption
    assert "The longest is 16\u00d7" in caption
    assert "attention at 1,024 tokens: out of memory" in caption


def test_seeds_of_a_heat_map_are_pooled_by_their_targets_and_an_empty_cell_is_no_zero() -> None:
    one, two = sample.beyond("mamba2", seed=0), sample.beyond("mamba2", seed=1)
    for record, accuracy, n in ((one, 0.5, 10), (two, 1.0, 30)):
        record["grid"] = {"lengths": [64], "depths": [0.25, 0.75], "accuracy": [[accuracy, None]], "n": [[n, 0]]}
    subject = gather([one, two]).subjects[0]
    rows = length_data.depth_rows(subject, "mqar")
    assert [(r["length"], r["ratio"], r["depth"], r["value"], r["n"]) for r in rows] == [
        (64, 1.0, 0.25, 0.875, 40), (64, 1.0, 0.75, None, 0),
    ]  # fmt: skip
    assert "and 1 more" in rows[0]["record"]


def test_distances_are_pooled_and_zero_has_a_place() -> None:
    record = {**sample.beyond("mamba2"), "by_distance": [[0, 1.0, 4], [2, 0.5, 2], [4, None, 0]]}
    rows = length_data.distance_rows(gather([record]), "mqar")
    assert [(r["distance"], r["value"], r["n"]) for r in rows] == [(1.0, 1.0, 4), (2, 0.5, 2)]


@pytest.mark.parametrize("grid", [None, {}, {"lengths": [64]}, {"lengths": [64], "depths": [0.5], "accuracy": [[]], "n": None}])
def test_grids_that_say_nothing_draw_nothing(grid: object) -> None:
    record = {**sample.beyond("mamba2"), "grid": grid, "by_distance": None, "by_length": []}
    assert not [chart for chart in build_charts(gather([record])) if chart.name.startswith("recall")]


@pytest.fixture(scope="module")
def charts() -> dict[str, Chart]:
    return {chart.name: chart for chart in build_charts(gather(sample.wide_records()))}


def test_every_chart_of_recall_and_of_a_second_task_is_drawn(charts: dict[str, Chart]) -> None:
    for name in ("quality_mqar", "quality_by_state_mqar", "recall_by_length_mqar", "recall_by_distance_mqar"):
        assert "mqar" in charts[name].title
    for name in ("recall_by_length_mqar", "recall_by_distance_mqar", "recall_by_depth_1_mqar"):
        svg = to_svg(charts[name].file_spec())
        ET.fromstring(svg)
        assert "NaN" not in svg
        assert "undefined" not in svg
    assert "1,024 (16\u00d7)" in svg


@pytest.mark.parametrize(("low", "high"), [(1, 10_000), (3, 40), (2.0e-3, 2.7e-3), (1.22e14, 1.44e14), (5, 5)])
def test_an_axis_has_ticks_however_narrow_it_is(low: float, high: float) -> None:
    ticks = marks.log_ticks([low, high])
    assert len([t for t in ticks if low / 1.2 <= t <= high * 1.2]) >= 3
    assert all(math.isclose(t, float(f"{t:.2g}")) for t in ticks)


def test_charts_of_quantities_zoom_and_others_do_not(charts: dict[str, Chart]) -> None:
    for chart in charts.values():
        zooms = [p for layer in chart.page_spec()["layer"] for p in layer.get("params", ())]
        assert len(zooms) == (0 if chart.name.startswith("recall_by_depth") else 1), chart.name
        assert not [p for layer in chart.file_spec()["layer"] for p in layer.get("params", ())]
