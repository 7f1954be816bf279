"""Charts: their points against numbers worked out by hand, and every one drawn by the real renderer."""

import math
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from hybridtf.core import HybridTFError
from hybridtf.report import chart_data as data
from hybridtf.report import front_data, marks, save_charts
from hybridtf.report.chart import Chart, to_svg
from hybridtf.report.charts import build_charts
from hybridtf.report.evidence import gather
from hybridtf.report.palette import RECIPE_COLOURS, recipe_keys
from tests.report import sample

ALL = [
    "quality", "quality_by_state", "quality_by_flops", "quality_by_decode", "training", "extrapolation",
    "loss_by_position", "state_by_length",
    "speed_train", "speed_prefill", "speed_decode", "memory_train", "memory_decode",
]  # fmt: skip


def charts(records: list[dict]) -> dict[str, Chart]:
    return {chart.name: chart for chart in build_charts(gather(records))}


def scales(spec: object, field: str) -> list[tuple[list, list]]:
    """(domain, range) of every colour scale over ``field``."""
    if isinstance(spec, list):
        return [found for item in spec for found in scales(item, field)]
    if not isinstance(spec, dict):
        return []
    found = [pair for value in spec.values() for pair in scales(value, field)]
    colour = spec.get("color")
    if isinstance(colour, dict) and colour.get("field") == field:
        found.append((colour["scale"]["domain"], colour["scale"]["range"]))
    return found


def test_curve_points_are_means_of_neighbours() -> None:
    curve = [[i, 10 * i, float(i)] for i in range(1, 601)]
    rows = data.curve_rows(gather([{**sample.train("mamba2"), "curve": curve}]))
    assert len(rows) == 300
    record = rows[0].pop("record")
    assert record.startswith("train-mamba2-seed0-")
    assert rows[0] == {"recipe": "mamba2", "seed": "0", "tokens": 20, "loss": 1.5, "steps": 2}
    assert rows[-1]["loss"] == 599.5


def test_positions_are_the_middles_of_buckets_and_seeds_are_weighted_by_tokens() -> None:
    first = {**sample.extrapolation("mamba2", 0), "by_position": [[0, 2.0, 10], [64, 1.0, 10], [128, 1.0, 0]]}
    second = {**sample.extrapolation("mamba2", 1), "by_position": [[0, 4.0, 30], [64, None, 10]]}
    rows = data.position_rows(gather([first, second]))
    assert [(r["position"], r["first"], r["last"], r["nats"], r["tokens"]) for r in rows] == [
        (32, 0, 63, 3.5, 40), (96, 64, 127, 1.0, 10),
    ]  # fmt: skip


def test_states_of_both_kinds_of_records() -> None:
    rows = data.state_rows(gather([sample.model("hybrid-3m1a"), sample.extrapolation("hybrid-3m1a")]))
    assert [row["length"] for row in rows] == [512, 1024, 2048, 4096, 8192, 65536]
    assert all(row["bytes"] == 1024 * row["length"] + 439_400 for row in rows)


def test_tradeoff_and_baselines() -> None:
    evidence = gather(sample.records())
    measure = evidence.measure()
    rows = front_data.state_rows(evidence, measure)
    assert [(r["recipe"], r["length"], r["cost"]) for r in rows[2:4]] == [
        ("mamba2", 1024, 585_792), ("mamba2", 65536, 585_792),
    ]  # fmt: skip
    baselines = {row["name"]: row["value"] for row in data.baseline_rows(evidence, measure)}
    assert baselines == {"bigram": sample.BASELINES["bigram"]}


@pytest.mark.parametrize(("lowest", "side"), [(2.0, "right"), (9.0, "left")])
def test_the_name_of_a_baseline_keeps_off_the_names_of_the_recipes(lowest: float, side: str) -> None:
    _, name = marks.baseline([{"name": "bigram", "value": 3.7}], "bits per byte", lowest)
    assert name.to_dict()["mark"]["align"] == side


def test_all_kinds_give_all_charts() -> None:
    assert list(charts(sample.records())) == ALL


@pytest.fixture(scope="module")
def drawn() -> dict[str, tuple[Chart, str]]:
    return {name: (chart, to_svg(chart.file_spec())) for name, chart in charts(sample.records()).items()}


@pytest.mark.parametrize("name", ALL)
def test_drawn_with_axes_legend_and_marks(name: str, drawn: dict[str, tuple[Chart, str]]) -> None:
    chart, svg = drawn[name]
    root = ET.fromstring(svg)
    words = [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert chart.title in words
    for key in chart.keys:
        assert key.label in words
        assert key.colour in svg
    assert "NaN" not in svg
    assert "undefined" not in svg
    units = {
        "quality": "held-out bits per byte", "quality_by_state": "(bytes, log scale)",
        "quality_by_flops": "(FLOP, log scale)", "quality_by_decode": "(s, log scale)", "training": "(nats/token)",
        "extrapolation": "multiple of the trained length", "loss_by_position": "(tokens)",
        "state_by_length": "tokens read",
        "speed": "tokens/s", "memory": "memory (bytes)",
    }
    unit = units[name if name in units else name.split("_")[0]]
    assert any(unit in word for word in words)


def test_a_recipe_has_one_colour_everywhere() -> None:
    expected = dict(zip(sample.RECIPES, RECIPE_COLOURS, strict=False))
    for chart in charts(sample.records()).values():
        for domain, colours in scales(chart.spec, "recipe"):
            assert dict(zip(domain, colours, strict=True)) == {label: expected[label] for label in domain}
    alone = charts([*sample.records(), sample.common("memory", "other")])["memory_decode"]
    assert alone.keys


def test_more_recipes_than_colours_differ_by_symbol() -> None:
    keys = recipe_keys([f"r{i}" for i in range(40)])
    assert len({(key.colour, key.shape) for key in keys}) == 40


@pytest.mark.parametrize("record", sample.records()[:7], ids=lambda r: f"{r['kind']}-{r.get('phase')}")
def test_one_record_alone(record: dict) -> None:
    found = charts([record])
    assert found
    for chart in found.values():
        ET.fromstring(to_svg(chart.file_spec()))


def test_no_records_no_charts() -> None:
    assert charts([]) == {}
    empty = {"curve": [], "by_position": [], "multiples": [], "bits_per_byte": [], "state_bytes": None, "interval": []}
    assert charts([{**sample.train("mamba2"), **empty}, {**sample.extrapolation("mamba2"), **empty}]) == {}


def test_numbers_that_are_none_are_left_out() -> None:
    record = sample.extrapolation("mamba2")
    record["bits_per_byte"] = [2.0, None, math.nan, 2.5, None]
    record["interval"] = [None, None, None, [2.4, 2.6], None]
    assert [(r["multiple"], r["value"]) for r in data.length_rows(gather([record]))] == [(1.0, 2.0), (8.0, 2.5)]
    ET.fromstring(to_svg(charts([record])["extrapolation"].file_spec()))


def test_several_seeds_are_one_line_with_a_band_and_a_curve_each() -> None:
    records = [make("mamba2", seed) for seed in range(3) for make in (sample.train, sample.extrapolation)]
    evidence = gather(records)
    assert len({row["seed"] for row in data.curve_rows(evidence)}) == 3
    rows = data.length_rows(evidence)
    assert len(rows) == 5
    assert all(row["seeds"] == 3 for row in rows)


def test_saved_as_svg_and_png(tmp_path: Path) -> None:
    records = [sample.quality("mamba2"), sample.model("mamba2")]
    files = save_charts(records, tmp_path / "charts")
    names = ["quality", "quality_by_state", "state_by_length", "stack_1"]
    assert [f.name for f in files] == [name + suffix for name in names for suffix in (".svg", ".png")]
    assert sorted(tmp_path.joinpath("charts").iterdir()) == sorted(files)
    for file in files:
        content = file.read_bytes()
        if file.suffix == ".svg":
            ET.fromstring(content)
        else:
            assert content.startswith(b"\x89PNG\r\n\x1a\n")
            assert int.from_bytes(content[16:20], "big") > 400


@pytest.mark.parametrize("package", ["altair", "vl_convert"])
def test_a_missing_extra_says_how_to_get_it(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(HybridTFError, match=r"pip install 'hybridtf\[report\]'"):
        save_charts([sample.quality("mamba2")], tmp_path)
    assert not list(tmp_path.iterdir())
