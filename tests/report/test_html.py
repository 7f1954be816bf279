"""The page: stands alone, runs nothing from a record, and holds all numbers."""

import base64
import copy
import hashlib
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hybridtf.core import HybridTFError
from hybridtf.report import compare_table, sifting, write_report
from hybridtf.report.evidence import gather
from hybridtf.report.measured import REF
from hybridtf.report.record_list import record_list
from tests.report import sample

EVIL = "<script>alert(1)</script></title><img src=http://evil.example/x onerror=alert(2)>&\"'`{{ 7*7 }}\x00\ud800"
VOID = {"meta", "br", "img", "link", "input", "hr", "base", "source"}


class Page(HTMLParser):
    """What a browser would see: elements with their attributes, the text of each script and style, all other text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("script", "style"):
            (self.scripts if tag == "script" else self.styles).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes what it did not open"

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside == "script":
            self.scripts[-1] += data
        elif inside == "style":
            self.styles[-1] += data
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split(" "))

    def json(self, name: str) -> Any:
        scripts = [attributes for tag, attributes in self.elements if tag == "script"]
        return json.loads(self.scripts[[s.get("id") for s in scripts].index(name)])


def written(records: list[Any], folder: Path, title: str | None = None) -> Page:
    path = write_report(records, folder / "report.html", title)
    return Page(path.read_text(encoding="utf-8"))


def spoil(value: Any) -> Any:
    """Every string of a record that is free text, made hostile."""
    if isinstance(value, str):
        return value + EVIL
    if isinstance(value, dict):
        return {key: spoil(item) for key, item in value.items()}
    return [spoil(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return written(sample.records(), tmp_path_factory.mktemp("report"), "Three recipes")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Page:
    records = []
    for record in sample.records():
        record = copy.deepcopy(record)
        kept = {name: record[name] for name in ("kind", "schema", "phase", "metric") if name in record}
        keys = record.get("state_bytes")
        record = {**spoil(record), **kept, "state_bytes": keys}
        record["kernels"] = {EVIL: {EVIL: EVIL}}
        record["environment"] = {**record["environment"], EVIL: EVIL}
        for stack in record.get("stacks", []):
            stack["blocks"] = {name + EVIL: block for name, block in stack["blocks"].items()}
        records.append(record)
    return written([*records, {**records[0], "kind": EVIL}], tmp_path_factory.mktemp("hostile"), EVIL)


@pytest.mark.parametrize("which", ["page", "hostile"])
def test_no_outside_address(which: str, request: pytest.FixtureRequest) -> None:
    found: Page = request.getfixturevalue(which)
    for tag, attributes in found.elements:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "image", "use", "video", "source"}
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in {"src", "href", "xlink:href", "srcset", "action", "data", "poster"}:
                assert (value or "").startswith("#"), (tag, name, value)
            assert not re.search(r"url\((?!#)", value or "") or "http-equiv" in attributes
    for style in found.styles:
        assert not re.search(r"@import|url\(|https?:", style)


@pytest.mark.parametrize("which", ["page", "hostile"])
def test_only_the_two_scripts_of_the_page_may_run(which: str, request: pytest.FixtureRequest) -> None:
    found: Page = request.getfixturevalue(which)
    kinds = [attributes for tag, attributes in found.elements if tag == "script"]
    assert [kind.get("type") for kind in kinds] == ["application/json", "application/json", None, None]
    policy = next(a["content"] for tag, a in found.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert "script-src 'unsafe" not in policy
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in found.scripts[2:]]
    assert re.findall(r"'sha256-([^']+)'", policy) == digests


def test_the_drawing_code_is_there_once(page: Page) -> None:
    bundle, own = page.scripts[2:]
    assert "vegaEmbed" in bundle
    assert len(bundle) > 500_000 > 50_000 > len(own)


def test_hostile_text_is_text(page: Page, hostile: Page) -> None:
    assert [tag for tag, _ in hostile.elements if tag == "img"] == []
    assert [tag for tag, _ in hostile.elements].count("h2") == [tag for tag, _ in page.elements].count("h2")
    assert "<script>alert(1)</script>" in hostile.text
    assert "{{ 7*7 }}" in hostile.text
    assert hostile.json("records")[0]["recipe"] == "attention" + EVIL


@pytest.mark.parametrize("which", ["page", "hostile"])
def test_ids_are_unique_and_links_lead_somewhere(which: str, request: pytest.FixtureRequest) -> None:
    found: Page = request.getfixturevalue(which)
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = [a["href"] for tag, a in found.elements if tag == "a"]
    assert len(targets) > 100
    assert {str(target)[1:] for target in targets} <= set(ids)
    for _, attributes in found.elements:
        for reference in re.findall(r"url\(#([^)]+)\)", " ".join(str(value) for value in attributes.values())):
            assert reference in ids


def test_all_numbers_and_all_recipes_are_there(page: Page) -> None:
    table = compare_table(sample.records())
    for row in table.rows:
        for column in table.columns:
            assert table.text(row, column, "\n").split("\n")[0] in page.text
    for name in sample.RECIPES:
        assert name in page.words
    others = ("bigram bits/byte", "Three recipes", "AMD EPYC 7B13", "torch-sdpa", "13.5\u202fGB/s")
    for word in ("(2.253\u20132.315)", *others):
        assert word in page.text, word
    assert "changes that were not committed" in page.text
    assert "the lowest held-out bits per byte" in page.text


def test_every_chart_is_drawn_still_and_can_be_drawn_live(page: Page) -> None:
    figures = [a["data-chart"] for tag, a in page.elements if tag == "figure" and "data-chart" in a]
    specs = page.json("chart-specs")
    assert sorted(map(str, figures)) == sorted(specs)
    assert len(figures) == 13
    assert sum(tag == "svg" and "marks" in str(a.get("class")) for tag, a in page.elements) == 13
    assert sum(tag == "svg" and a.get("class") == "stack" for tag, a in page.elements) == 3
    assert all(spec["width"] == "container" for spec in specs.values())


def test_the_records_are_inside_as_they_were(page: Page) -> None:
    assert page.json("records") == json.loads(json.dumps(sample.records()))


def test_one_record_and_missing_kinds(tmp_path: Path) -> None:
    page = written([sample.quality("mamba2")], tmp_path)
    assert "2.243" in page.text
    assert page.words.count("not run") >= 9
    assert "1 recipe, 1 record." in page.text


def test_a_task_of_rows_is_not_asked_for_longer_texts(tmp_path: Path) -> None:
    page = written([sample.recall("attention", 0.61, 0.31)], tmp_path)
    assert "Longer" not in page.words
    assert "bits/byte" not in page.words
    assert "Longer than trained" in written([sample.quality("attention")], tmp_path).words


def test_no_records_at_all(tmp_path: Path) -> None:
    assert "There are no records that can be shown." in written([], tmp_path).text


def test_left_out_records_are_named(tmp_path: Path) -> None:
    record = sample.quality("mamba2")
    page = written([record, {**record, "schema": 2}, 7, {"kind": "x", "schema": 1}], tmp_path)
    assert "schema 2 is newer" in page.text
    assert "unknown kind 'x'" in page.text


def test_numbers_that_json_lacks(tmp_path: Path) -> None:
    page = written([{**sample.quality("mamba2"), "value": float("nan")}], tmp_path)
    assert page.json("records")[0]["value"] is None
    assert "has no held-out score (not finite)" in page.text


def test_a_write_that_fails_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(HybridTFError, match="No space left"):
        write_report([], target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("package", ["altair", "jinja2", "vl_convert"])
def test_a_missing_extra_says_how_to_get_it(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(HybridTFError, match=r"pip install 'hybridtf\[report\]'"):
        write_report([sample.quality("mamba2")], tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_every_number_of_every_table_leads_to_its_records(wide_page: Path) -> None:
    text = wide_page.read_text(encoding="utf-8")
    assert wide_page.stat().st_size < 6_000_000
    cells = re.findall(r'<td data-label="[^"]*"(?: data-sort="[^"]*")? class="number([^"]*)"><span>(.*?)</span></td>', text)
    assert len(cells) > 250
    assert [inside for kind, inside in cells if not kind and not inside.startswith('<a href="#')] == []
    words = [inside for kind, inside in cells if "missing" in kind]
    assert [word for word in words if "not run" not in word and "not measured" not in word and "<a " not in word] == []
    page = Page(text)
    ids = {a["id"] for _, a in page.elements if "id" in a}
    assert {str(a["href"])[1:] for tag, a in page.elements if tag == "a"} <= ids


def test_a_record_is_one_fold_with_its_json_and_without_what_the_report_added() -> None:
    record = sample.beyond("mamba2")
    (entry,) = record_list(gather([record]), [record])
    assert entry["words"] == "extrapolation, mamba2, mqar, seed 0"
    assert json.loads(entry["text"])["by_length"] == record["by_length"]
    assert json.loads(entry["text"])["kind"] == "extrapolation"
    (long,) = record_list(gather([sample.train("mamba2")]), [sample.train("mamba2")])
    assert "... 696 more ..." in json.loads(long["text"])["curve"]


def test_two_records_have_two_names_and_one_record_always_the_same() -> None:
    names = [sifting.named(record)[REF] for record in sample.wide_records()]
    assert len(set(names)) == len(names)
    assert names == [sifting.named(record)[REF] for record in sample.wide_records()]
    assert all(re.fullmatch(r"[A-Za-z0-9-]+", name) for name in names)
